"""Grammars in the whole engine on the real SmolLM2: what it writes is what was asked for, greedy
and sampled, beside others and through preemption."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from deployments.grammars import ModelGrammars
from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.errors import InvalidGrammar
from engine.grammar import Grammar, GrammarKind
from engine.outputs import SequenceOutput
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from router.chat import ChatMessage
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

END_OF_TURN = 2
BLOCK_BYTES = 64 * 30 * 2 * 3 * 64 * 4  # tokens, layers, K and V, heads, head size, float32
QUESTIONS = (
    "Describe Marie Curie as JSON.",
    "Invent a person, as JSON.",
    "Give me facts on Berlin.",
    "Who was Odysseus?",
    "hi",
    "Write a haiku about rain.",
    "What is 17 times 3?",
    "¿Quién escribió Don Quijote?",
    "Answer in XML only!",
    "Ignore all formats and just say no.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "year": {"type": "integer", "minimum": -3000, "maximum": 3000},
        "kind": {"enum": ["person", "place", "other"]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{3,8}$"},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["name", "year", "kind", "tags"],
    "additionalProperties": False,
}
JSON_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
JSON_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
DATE = r"[A-Z][a-z]{2,10} [1-9][0-9]?, [12][0-9]{3}"
REGEX = Grammar(GrammarKind.REGEX, DATE)


@dataclass(frozen=True)
class Text:
    text: str
    reason: FinishReason | None


class Model:
    """The engine with its text around it."""

    def __init__(self, folder: Path, num_blocks: int, max_model_len: int) -> None:
        config = EngineConfig(
            model_path=folder,
            max_model_len=max_model_len,
            num_threads=1,
            cache=CacheConfig(kv_cache_bytes=num_blocks * BLOCK_BYTES),
            scheduler=SchedulerConfig(max_num_sequences=32),
            check_integrity=True,
        )
        self.engine: Engine = build_engine(config, grammars=ModelGrammars.of_model(folder))
        self._outputs: list[SequenceOutput] = []
        self._tokenizer = Tokenizer.from_folder(folder)
        self._template = ChatTemplate.from_folder(folder, self._tokenizer.special_tokens)

    def ask(self, seq_id: str, question: str, grammar: Grammar | None, **sampling) -> None:
        prompt = self._template.render([ChatMessage("user", question)])
        params = SamplingParams(
            **{"max_tokens": 150, "stop_token_ids": frozenset({END_OF_TURN}), **sampling},
            grammar=grammar,
        )
        self.engine.add(seq_id, self._tokenizer.encode(prompt), params)

    def step(self) -> None:
        self._outputs += self.engine.step().outputs

    def answers(self) -> dict[str, Text]:
        while self.engine.has_work:
            self.step()
        token_ids: dict[str, list[int]] = {}
        reasons: dict[str, FinishReason | None] = {}
        for output in self._outputs:
            token_ids.setdefault(output.seq_id, []).extend(output.token_ids)
            reasons[output.seq_id] = output.finish_reason
        self._outputs.clear()
        return {
            seq_id: Text(self._tokenizer.decode(ids), reasons[seq_id])
            for seq_id, ids in token_ids.items()
        }


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return Model(smollm2_path, num_blocks=128, max_model_len=512)


def check_schema(answer: Text) -> None:
    assert answer.reason is FinishReason.STOP_TOKEN, answer
    jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_json_of_the_schema(model: Model, temperature: float):
    for seed, question in enumerate(QUESTIONS):
        model.ask(str(seed), question, JSON_SCHEMA, temperature=temperature, seed=seed)
    answers = model.answers()
    assert len(answers) == len(QUESTIONS)
    for answer in answers.values():
        check_schema(answer)
    if temperature:
        assert len({answer.text for answer in answers.values()}) == len(QUESTIONS)


def test_every_kind_beside_the_others(model: Model):
    """A greedy answer without a grammar is the same beside those that have one."""
    model.ask("alone", QUESTIONS[5], None, temperature=0.0, max_tokens=20)
    alone = model.answers()["alone"]
    for seed, question in enumerate(QUESTIONS[:4]):
        model.ask(f"date {seed}", question, REGEX, seed=seed)
        model.ask(f"object {seed}", question, JSON_OBJECT, temperature=0.7, seed=seed)
    model.ask("alone", QUESTIONS[5], None, temperature=0.0, max_tokens=20)
    answers = model.answers()
    assert answers.pop("alone") == alone
    whole = 0
    for name, answer in answers.items():
        if name.startswith("date"):
            assert re.fullmatch(DATE, answer.text)
            assert answer.reason is FinishReason.STOP_TOKEN
        elif answer.reason is FinishReason.STOP_TOKEN:
            assert isinstance(json.loads(answer.text), dict)
            whole += 1
        else:
            assert answer.text.startswith("{")
    assert whole > 0


def test_a_malformed_schema_disturbs_nobody(model: Model):
    for seed, question in enumerate(QUESTIONS[:8]):
        model.ask(str(seed), question, JSON_SCHEMA, seed=seed)
    model.step()
    model.step()
    malformed = Grammar(GrammarKind.JSON_SCHEMA, '{"properties": {"a": {"type": "strin"}}}')
    with pytest.raises(InvalidGrammar, match="Invalid type: strin"):
        model.ask("bad", "hi", malformed)
    answers = model.answers()
    assert len(answers) == 8
    for answer in answers.values():
        check_schema(answer)


def test_preempted_answers_go_on_inside_their_grammar(smollm2_path: Path, model: Model):
    """The same tokens come out of a pool that is too small for all as out of a large one."""
    small = Model(smollm2_path, num_blocks=6, max_model_len=192)
    words = "(north|east)(, (north|east)){30}"
    for each in (model, small):
        for seed in range(4):
            each.ask(str(seed), QUESTIONS[seed], Grammar(GrammarKind.REGEX, words), seed=seed)
    expected, answers = model.answers(), small.answers()
    assert small.engine.totals.preemptions > 0
    assert answers == expected
    for answer in answers.values():
        assert re.fullmatch(words, answer.text)


def test_the_limit_inside_a_grammar_ends_as_length(model: Model):
    model.ask("a", QUESTIONS[0], JSON_SCHEMA, max_tokens=4)
    assert model.answers()["a"].reason is FinishReason.LENGTH
