"""The real compiler over a tokenizer of single bytes: what it lets through, what it refuses, what
it costs."""

import json
import logging
import random
import re
import threading
import time

import numpy as np
import pytest

from deployments import grammars
from deployments.grammars import MAX_REASON_CHARACTERS, ModelGrammars
from engine.errors import InvalidGrammar
from engine.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind, num_mask_words
from tests.fakes.byte_text import EOS, VOCAB_SIZE, allowed_ids, byte_grammars, byte_text

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def compile_(grammar: Grammar):
    return byte_grammars().compile(grammar)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is one that the grammar wants."""
    state = compile_(grammar)
    for token_id in byte_text().encode(text):
        if token_id not in allowed_ids(state):
            return False
        state.accept(token_id)
    return EOS in allowed_ids(state)


def walk(state, draw: random.Random, max_tokens: int = 400) -> str | None:
    """A text that the masks allow, ended where they let it; None when it got too long."""
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        token_id = draw.choice(sorted(allowed_ids(state)))
        if token_id == EOS:
            return byte_text().decode(token_ids)
        state.accept(token_id)
        token_ids.append(token_id)
    return None


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("a[bc]+", ["ab", "acbb"], ["a", "", "abd", "xab"]),
        ("^abc$", ["abc"], ["abcd", "ab"]),
        (r"\d{4}-\d\d", ["2026-11"], ["2026-1", "2026-111"]),
        ("(?:)", [""], ["a"]),
        ("(?i)yes|no", ["YES", "no"], ["maybe"]),
        ("é|☃", ["é", "☃"], ["e"]),
    ],
)
def test_a_regex_is_matched_as_a_whole(pattern, matching, other):
    assert all(accepts(regex(pattern), text) for text in matching)
    assert not any(accepts(regex(pattern), text) for text in other)


def test_random_walks_match_their_regex():
    draw = random.Random(0)
    for pattern in (
        "[a-c]{2,5}x?",
        "(foo|bar)(,(foo|bar)){0,3}",
        "-?[1-9][0-9]{0,4}([.][0-9]{1,3})?",
    ):
        for _ in range(20):
            assert re.fullmatch(pattern, walk(compile_(regex(pattern)), draw))


def test_a_schema_lets_its_values_through():
    for text in ('{"name":"Ann","age":3}', '{ "name": "",\n  "age": -12 }'):
        assert accepts(schema(PERSON), text)
    for text in ('{"name":"Ann"}', '{"age":3,"name":"Ann"}', '{"name":"Annabel","age":3}', "null"):
        assert not accepts(schema(PERSON), text)


def test_a_json_object_is_any_object_and_nothing_else():
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    assert accepts(grammar, '{"a": [1, {"b": null}], "é": "\\n"}')
    assert accepts(grammar, "{}")
    for text in ("[]", "1", '"a"', "", "{} ", "{'a': 1}"):
        assert not accepts(grammar, text)


def test_blanks_in_json_come_to_an_end():
    assert accepts(schema(PERSON), '{"name":"a",' + "\n" * 64 + '"age":1}')
    assert not accepts(schema(PERSON), '{"name":"a",' + "\n" * 65 + '"age":1}')


def test_where_it_is_complete_only_the_end_is_left():
    state = compile_(regex("ab"))
    for token_id in byte_text().encode("ab"):
        assert EOS not in allowed_ids(state)
        state.accept(token_id)
    assert allowed_ids(state) == {EOS}
    state.accept(EOS)
    assert allowed_ids(state) == {EOS}
    assert not state.has_failed


def test_ids_without_text_and_special_tokens_are_never_allowed():
    state = compile_(regex("(.|\n)*"))
    allowed = allowed_ids(state)
    assert max(allowed) < byte_text().vocabulary_size < VOCAB_SIZE
    assert byte_text().special_ids & allowed == {EOS}


def test_a_mask_is_written_whole():
    state = compile_(regex("a"))
    expected = allowed_ids(state)
    mask = np.full((2, num_mask_words(VOCAB_SIZE)), -1, dtype=np.int32)
    state.fill(mask[1])
    assert (mask[0] == -1).all()
    assert np.bitwise_count(mask[1].view(np.uint32)).sum() == len(expected)


def test_states_of_one_grammar_are_their_own():
    first, second = compile_(regex("ab")), compile_(regex("ab"))
    first.accept(byte_text().encode("a")[0])
    assert allowed_ids(second) == set(byte_text().encode("a"))
    assert allowed_ids(first) == set(byte_text().encode("b"))


def deep(num_levels: int) -> str:
    return '{"properties":{"a":' * num_levels + "{}" + "}}" * num_levels


def wide(num_properties: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(num_properties)}}


MALFORMED = {
    "not JSON": (Grammar(GrammarKind.JSON_SCHEMA, "{"), "Expecting property name"),
    "no object": (schema([]), r"expected a JSON object, got '\[\]'"),
    "no type": (schema({"type": "strin"}), "Invalid type: strin"),
    "unknown keyword": (schema({"not": {"type": "string"}}), r'Unimplemented keys: \["not"\]'),
    "own switches": (schema({"x-guidance": {"lenient": True}, "not": {}}), "Unimplemented keys"),
    "foreign reference": (schema({"$ref": "file:///etc/hostname"}), "does not fetch resources"),
    "dangling reference": (schema({"$ref": "#/$defs/a"}), "does not exist"),
    "circle": (schema({"$ref": "#"}), "no text matches it"),
    "contradiction": (schema({"type": "string", "enum": [1]}), "Unsatisfiable schema"),
    "number beyond JSON": (Grammar(GrammarKind.JSON_SCHEMA, '{"const": 1e999}'), "expected value"),
    "deep": (Grammar(GrammarKind.JSON_SCHEMA, deep(300)), "recursion limit exceeded"),
    "deep text": (Grammar(GrammarKind.JSON_SCHEMA, "[" * MAX_GRAMMAR_CHARACTERS), "recursion"),
    "wide": (schema(wide(1_500)), "Current row has"),
    "half a character": (Grammar(GrammarKind.JSON_SCHEMA, '{"const": "\\ud800"}'), "hex escape"),
    "open bracket": (regex("("), "unclosed group"),
    "look-ahead": (regex("(?=a)b"), "look-around"),
    "back-reference": (regex(r"(a)\1"), "backreferences"),
    "empty class": (regex(r"[^\s\S]"), "no text matches it"),
    "expensive": (regex("(a?){3000}a{3000}"), "too many expressions"),
    "surrogate": (regex("\ud800"), "surrogates not allowed"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_grammar_is_refused_with_its_fault(name):
    grammar, words = MALFORMED[name]
    with pytest.raises(InvalidGrammar, match=words) as refused:
        compile_(grammar)
    assert str(refused.value).startswith(f"this {grammar.kind} cannot be followed: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < MAX_REASON_CHARACTERS + 100


EXPENSIVE = {
    "branches": schema(
        {
            "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 3} for i in range(20)}
            | {"a20": PERSON},
            "$ref": "#/$defs/a0",
        }
    ),
    "many values": schema({"enum": [f"value {i}" for i in range(4_000)]}),
    "long text": schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "many items": schema({"type": "array", "items": PERSON, "minItems": 10**6}),
    "many keys": schema(wide(450)),
    "repeats": regex("(a|aa|b){1,5000}c"),
    "nested repeats": regex("((a{1,100}){1,100}){1,100}"),
    "states": regex(r"([a-zA-Z0-9 ]*[aeiou][a-zA-Z0-9 ]{60}){3}"),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_the_cost_of_any_grammar_is_bounded(name):
    """Twenty times what a two-core CPU host takes. Whether it is refused, fails in the middle or
    goes on is the library's choice: an end is always allowed, or something else."""
    started_s = time.process_time()
    try:
        state = compile_(EXPENSIVE[name])
    except InvalidGrammar:
        return
    draw = random.Random(0)
    for _ in range(50):
        allowed = allowed_ids(state)
        assert allowed
        if state.has_failed:
            assert allowed == {EOS}
        state.accept(draw.choice(sorted(allowed - {EOS} or allowed)))
    assert time.process_time() - started_s < 10.0


def test_a_grammar_that_fails_in_the_middle_allows_the_end_alone(caplog, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_LEXER_STATES", 200)
    small = ModelGrammars(byte_text(), VOCAB_SIZE, [EOS])
    state = small.compile(regex("([a-z ]*e[a-z ]{30})+"))
    draw = random.Random(0)
    with caplog.at_level(logging.WARNING):
        for _ in range(1_000):
            allowed = allowed_ids(state)
            if state.has_failed:
                break
            state.accept(draw.choice(sorted(allowed - {EOS})))
    assert allowed == {EOS}
    state.accept(EOS)
    assert allowed_ids(state) == {EOS}
    (record,) = caplog.records
    assert "grammar failed reason=lexer error: too many states" in record.message


def test_compiling_leaves_the_interpreter_to_others():
    """The step thread goes on while a caller's grammar is compiled: one of a tenth of a second."""

    def refused() -> None:
        with pytest.raises(InvalidGrammar):
            compile_(schema(wide(1_500)))

    compiling = threading.Thread(target=refused)
    compiling.start()
    ticks = 0
    while compiling.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 3


def test_several_tokens_may_end_a_completion():
    state = ModelGrammars(byte_text(), VOCAB_SIZE, [EOS, 299]).compile(regex("a?"))
    assert allowed_ids(state) == {EOS, 299, *byte_text().encode("a")}
