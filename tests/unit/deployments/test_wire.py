import dataclasses
import pickle
import pickletools
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.wire import to_router_error, to_sampling_params, to_token_event
from engine import errors as engine_errors
from engine.grammar import MAX_GRAMMAR_CHARACTERS
from engine.grammar import Grammar as EngineGrammar
from engine.grammar import GrammarKind as EngineGrammarKind
from engine.outputs import SequenceOutput, StepOutput, StepStats, TokenLogprobs
from engine.outputs import Usage as EngineUsage
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason as EngineFinishReason
from router import generation
from router.errors import BackendError, BackendUnavailable, InvalidRequest
from router.generation import FinishReason, Grammar, GrammarKind, SamplingSettings
from router.protocols import base

SETTINGS = st.builds(
    SamplingSettings,
    max_tokens=st.integers(0, 1000),
    temperature=st.floats(0, 2),
    top_k=st.none() | st.integers(1, 100),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 99), unique=True).map(tuple),
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100))).map(tuple),
    num_logprobs=st.none() | st.integers(0, 20),
)
GRAMMARS = st.one_of(
    st.builds(
        Grammar,
        st.sampled_from([GrammarKind.JSON_SCHEMA, GrammarKind.REGEX]),
        st.text(min_size=1),
    ),
    st.just(Grammar(GrammarKind.JSON_OBJECT)),
)


def names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_no_side_has_a_field_the_other_lacks():
    assert names(SamplingSettings) == names(SamplingParams)
    assert names(generation.Usage) == [*names(EngineUsage), "reasoning_tokens"]  # upstreams' only
    assert names(generation.TokenLogprobs) == names(TokenLogprobs)
    assert get_type_hints(EngineUsage).items() <= get_type_hints(generation.Usage).items()
    assert {reason.value for reason in EngineFinishReason} < {r.value for r in FinishReason}


@given(SETTINGS)
def test_sampling_keeps_every_value(settings: SamplingSettings):
    params = to_sampling_params(settings)
    for name in names(SamplingSettings):
        expected = getattr(settings, name)
        if name == "stop_token_ids":
            expected = frozenset(expected)
        assert getattr(params, name) == expected


@given(GRAMMARS)
def test_a_grammar_keeps_its_kind_and_text(grammar: Grammar):
    settings = SamplingSettings(max_tokens=1, stop_token_ids=(2,), grammar=grammar)
    engines = to_sampling_params(settings).grammar
    assert engines is not None
    assert (engines.kind.value, engines.text) == (grammar.kind.value, grammar.text)


def test_both_sides_know_the_same_grammars():
    assert [kind.value for kind in GrammarKind] == [kind.value for kind in EngineGrammarKind]
    assert names(Grammar) == names(EngineGrammar)
    assert base.MAX_GRAMMAR_CHARACTERS == MAX_GRAMMAR_CHARACTERS
    with pytest.raises(InvalidRequest, match="a regex has a text"):
        to_sampling_params(SamplingSettings(max_tokens=1, grammar=Grammar(GrammarKind.REGEX)))


def test_values_the_engine_refuses_are_the_callers_error():
    with pytest.raises(InvalidRequest, match="temperature"):
        to_sampling_params(SamplingSettings(max_tokens=1, temperature=-1))


@pytest.mark.parametrize("reason", [None, *EngineFinishReason])
def test_outputs_become_events(reason: EngineFinishReason | None):
    logprobs = (TokenLogprobs(-0.5, ((3, -0.5), (4, -2.0))),)
    output = SequenceOutput("s", (3,), logprobs, reason, EngineUsage(9, 4, 6))
    event = to_token_event(output, 5)
    assert (event.request_id, event.index, event.token_ids) == ("s", 5, (3,))
    assert event.usage == generation.Usage(9, 4, 6)
    assert event.logprobs == (generation.TokenLogprobs(-0.5, ((3, -0.5), (4, -2.0))),)
    assert event.finish_reason == (None if reason is None else FinishReason(reason.value))


def engine_error_types() -> list[type[engine_errors.EngineError]]:
    return [
        kind
        for kind in vars(engine_errors).values()
        if isinstance(kind, type) and issubclass(kind, engine_errors.EngineError)
    ]


@pytest.mark.parametrize("kind", engine_error_types())
def test_every_engine_error_has_a_router_error(kind: type[engine_errors.EngineError]):
    error = to_router_error(kind("12 > 8"))
    if issubclass(kind, engine_errors.InvalidSequence):
        assert isinstance(error, InvalidRequest)
        assert error.message == "12 > 8"
    elif issubclass(kind, engine_errors.EngineStopped):
        assert isinstance(error, BackendUnavailable)
        assert error.retry_after_s
    else:
        assert type(error) is BackendError
        assert "12 > 8" not in error.message


def test_what_crosses_for_every_token_is_made_anew_by_its_constructor():
    usage = EngineUsage(5, 1, 2)
    logprobs = (TokenLogprobs(-0.5, ((3, -0.5),)),)
    output = SequenceOutput("r", (3,), logprobs, EngineFinishReason.LENGTH, usage)
    step = StepOutput((output,), StepStats(0, 1, 0, 1, 0, 9, 10, 1.5))
    event = to_token_event(output, 1)
    for crossing in (step, event):
        pickled = pickle.dumps(crossing, protocol=5)
        assert pickle.loads(pickled) == crossing
        operations = [operation.name for operation, _, _ in pickletools.genops(pickled)]
        assert "BUILD" not in operations  # no __setstate__
