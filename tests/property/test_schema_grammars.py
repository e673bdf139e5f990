"""Any small JSON schema can be compiled, and whatever its masks let through is a value of it."""

import json
import random
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import Grammar, GrammarKind
from tests.fakes.byte_text import EOS, allowed_ids, byte_grammars, byte_text

MAX_TOKENS = 1500
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="!"), max_size=4)
SCALARS = st.none() | st.booleans() | st.integers(-99, 999) | TEXTS


@st.composite
def ranges(draw, low: str, high: str, most: int) -> dict[str, int]:
    """A lower bound, an upper one, both or none."""
    first, second = sorted((draw(st.integers(0, most)), draw(st.integers(0, most))))
    bounds = {low: first, high: second}
    return {name: bounds[name] for name in draw(st.sets(st.sampled_from((low, high))))}


@st.composite
def objects(draw, children: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(TEXTS, children, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    st.builds(lambda bounds: {"type": "integer", **bounds}, ranges("minimum", "maximum", 500)),
    st.builds(lambda bounds: {"type": "number", **bounds}, ranges("minimum", "maximum", 50)),
    st.builds(lambda bounds: {"type": "string", **bounds}, ranges("minLength", "maxLength", 4)),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-c]{1,3}$", "^(x|yy)*$")]),
    st.sampled_from([{"type": "string", "format": name} for name in ("date", "uuid", "ipv4")]),
    st.builds(lambda value: {"const": value}, SCALARS),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
)


def containers(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, bounds: {"type": "array", "items": items, "maxItems": 3, **bounds},
        children,
        ranges("minItems", "maxItems", 3),
    )
    unions = st.builds(
        lambda branches: {"anyOf": branches}, st.lists(children, min_size=1, max_size=3)
    )
    return st.one_of(objects(children), arrays, unions)


SCHEMAS = st.recursive(LEAVES, containers, max_leaves=6)


def sampled_text(grammar: Grammar, draw: random.Random) -> str | None:
    """Random bytes under the masks; every other chance to end is taken. None when too long."""
    state = byte_grammars().compile(grammar)
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS:
        allowed = allowed_ids(state)
        assert allowed
        assert not state.has_failed
        others = sorted(allowed - {EOS})
        if not others or (EOS in allowed and draw.random() < 0.5):
            return byte_text().decode(token_ids)
        token_ids.append(draw.choice(others))
        state.accept(token_ids[-1])
    return None


@settings(max_examples=200, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_is_let_through_is_a_value_of_the_schema(schema: dict[str, Any], seed: int) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    text = sampled_text(grammar, random.Random(seed))
    if text is not None:
        jsonschema.validate(json.loads(text), schema)
