"""The one dictionary between the engine's words and the router's, and how both cross processes."""

import copyreg
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from engine import errors as engine_errors
from engine.grammar import Grammar, GrammarKind
from engine.outputs import SequenceOutput, StepOutput, StepStats
from engine.outputs import TokenLogprobs as EngineLogprobs
from engine.outputs import Usage as EngineUsage
from engine.sampling_params import SamplingParams
from router.errors import BackendError, BackendUnavailable, InvalidRequest, RouterError
from router.generation import FinishReason, SamplingSettings, TokenEvent, TokenLogprobs, Usage


def to_sampling_params(settings: SamplingSettings) -> SamplingParams:
    """Raises InvalidRequest when the engine refuses a value."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    values["stop_token_ids"] = frozenset(settings.stop_token_ids)
    try:
        if settings.grammar is not None:
            kind = GrammarKind(settings.grammar.kind.value)
            values["grammar"] = Grammar(kind, settings.grammar.text)
        return SamplingParams(**values)
    except engine_errors.InvalidSamplingParams as exc:
        raise InvalidRequest(str(exc)) from exc


def to_usage(usage: EngineUsage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def to_token_event(output: SequenceOutput, index: int) -> TokenEvent:
    """`index` is the position of the output's first token in the completion."""
    reason = output.finish_reason
    return TokenEvent(
        request_id=output.seq_id,
        index=index,
        token_ids=output.token_ids,
        usage=to_usage(output.usage),
        logprobs=tuple(TokenLogprobs(entry.logprob, entry.top) for entry in output.logprobs),
        finish_reason=None if reason is None else FinishReason(reason.value),
    )


def to_router_error(error: engine_errors.EngineError) -> RouterError:
    match error:
        case engine_errors.InvalidSequence():
            return InvalidRequest(str(error))
        case engine_errors.EngineStopped():
            return BackendUnavailable("the engine stopped and is being restarted", retry_after_s=10)
        case _:
            return BackendError("the engine failed on this request")


def _in_order(of_type: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    """How pickle makes one anew: by its constructor. What a frozen dataclass with slots does of
    itself takes 10 us an object, with several objects a token."""
    values = attrgetter(*(field.name for field in fields(of_type)))
    return lambda instance: (of_type, values(instance))


for _crossing in (
    *(SequenceOutput, StepOutput, StepStats, EngineUsage, EngineLogprobs),
    *(TokenEvent, Usage, TokenLogprobs),
):
    copyreg.pickle(_crossing, _in_order(_crossing))
