"""Bodies of the OpenAI dialect to what they mean.

What the dialect itself forbids is refused here; what only some models can do is noted
(`features.py`). Fields that change nothing about the text (user, metadata, service_tier,
prompt_cache_*, ...) are accepted; so are `reasoning_effort` and `verbosity`, which are hints about
how to answer and promise nothing a client could check. Texts of several parts are joined by a
newline.
"""

from collections.abc import Iterator, Sequence

from router.chat import ChatMessage, ChatRequest, Role
from router.errors import InvalidRequest
from router.generation import Grammar, GrammarKind
from router.protocols.base import (
    MIN_TOP_P,
    Problem,
    check_body,
    check_grammar_size,
    check_stop_size,
    schema_grammar,
)
from router.protocols.openai.features import chat_features, is_token_id
from router.protocols.openai.schema import ChatBody, Message, OtherPart, TextPart

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_CONTENT_FREE = ("tool_calls", "function_call", "audio", "refusal")


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest."""
    fields = check_body(ChatBody, body, _refuse)
    _check_combinations(fields)
    _check_tool_calls(fields.messages)
    limits = (fields.max_completion_tokens, fields.max_tokens)
    return ChatRequest(
        model=fields.model,
        messages=tuple(_messages(fields.messages)),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        temperature=_or(fields.temperature, 1.0),
        top_k=fields.top_k if fields.top_k is not None and fields.top_k > 0 else None,
        top_p=max(_or(fields.top_p, 1.0), MIN_TOP_P),
        min_p=_or(fields.min_p, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields),
        num_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        grammar=_grammar(fields),
        ignore_eos=bool(fields.ignore_eos),
        seed=fields.seed,
        stop_strings=_stops(fields),
        num_completions=fields.n or 1,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        features=chat_features(fields).in_order(),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _refuse(problem: Problem) -> InvalidRequest:
    param = _dotted(problem.path)
    if problem.kind == "extra_forbidden":
        return InvalidRequest(f"Unrecognized request argument supplied: {param}", param=param)
    return _invalid(param, problem.message)


def _dotted(path: tuple[int | str, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def _invalid(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': {message}", param=param)


def _check_combinations(fields: ChatBody) -> None:
    limits = {fields.max_tokens, fields.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise _invalid(
            "max_tokens",
            f"got {fields.max_tokens}, and {fields.max_completion_tokens} as "
            "max_completion_tokens; send one of them",
        )
    if fields.top_logprobs is not None and not fields.logprobs:
        raise _invalid("top_logprobs", "only allowed when 'logprobs' is true")


def _stops(fields: ChatBody) -> tuple[str, ...]:
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if "" in stops:
        raise _invalid("stop", "expected stop strings of at least one character, got ''")
    check_stop_size(stops, "stop")
    return tuple(stops)


def _logit_bias(fields: ChatBody) -> tuple[tuple[int, float], ...]:
    biases = (fields.logit_bias or {}).items()
    return tuple((int(token), bias) for token, bias in biases if is_token_id(token))


def _grammar(fields: ChatBody) -> Grammar | None:
    response_format, structured = fields.response_format, fields.structured_outputs
    has_format = response_format is not None and response_format.type != "text"
    if fields.ignore_eos and (has_format or structured is not None):
        raise _invalid("ignore_eos", "a structured output ends with the end token; drop either")
    if structured is not None:
        if has_format:
            raise _invalid("structured_outputs", "got response_format too; send one of them")
        check_grammar_size(structured.regex, "structured_outputs.regex")
        return Grammar(GrammarKind.REGEX, structured.regex)
    if response_format is None or not has_format:
        return None
    if response_format.type == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if response_format.json_schema is None:
        raise _invalid("response_format.json_schema", "Field required")
    return schema_grammar(response_format.json_schema.schema_, "response_format.json_schema.schema")


def _check_tool_calls(messages: Sequence[Message]) -> None:
    """Each tool call is answered by one tool message, before anything else is said."""
    unanswered: dict[str, str] = {}  # the id of a call, and where it stands
    for index, message in enumerate(messages):
        if message.role == "tool":
            if unanswered.pop(message.tool_call_id or "", None) is None:
                raise _invalid(
                    f"messages[{index}].tool_call_id",
                    "expected the id of an unanswered tool call of the assistant message before, "
                    f"got {message.tool_call_id}",
                )
            continue
        _check_answered(unanswered)
        for call in message.tool_calls or []:
            unanswered[call.id] = f"messages[{index}].tool_calls"
    _check_answered(unanswered)


def _check_answered(unanswered: dict[str, str]) -> None:
    for call_id, path in unanswered.items():
        raise _invalid(path, f"expected a tool message for {call_id} right after it")


def _messages(messages: Sequence[Message]) -> Iterator[ChatMessage]:
    """The texts; what tools answered is not among them."""
    for index, message in enumerate(messages):
        if message.content is None and not _may_lack_content(message):
            raise _invalid(
                f"messages[{index}].content", "expected a string or a list of text parts, got null"
            )
        role = _ROLES.get(message.role)
        if role is not None:
            yield ChatMessage(role, _text(message.content or ""))


def _may_lack_content(message: Message) -> bool:
    return message.role == "function" or (
        message.role == "assistant"
        and any(getattr(message, name) is not None for name in _CONTENT_FREE)
    )


def _text(content: str | list[TextPart | OtherPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))
