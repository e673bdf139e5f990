"""Bodies of the OpenAI dialect to what they mean for a local model.

Fields that change nothing a local model does (user, metadata, service_tier, prompt_cache_*, ...)
are accepted; so are `reasoning_effort` and `verbosity`, which are hints about how to answer and
promise nothing a client could check. Fields that ask for something a local model cannot do are
refused by name. Texts of several parts are joined by a newline.
"""

from router.chat import ChatMessage, ChatRequest, Role
from router.errors import InvalidRequest, UnsupportedFeature
from router.protocols.base import MIN_TOP_P, Problem, check_body, check_stop_size
from router.protocols.openai.schema import ChatBody, Message, OtherPart, TextPart

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_NO_TOOLS = "local models call no tools; drop it"
_REFUSED = {
    "audio": "local models answer in text only; drop it",
    "functions": _NO_TOOLS,
    "moderation": "nothing is moderated here; drop it",
    "prediction": "local models take no predicted output; drop it",
    "store": "completions are not stored here; drop it or send false",
    "tools": _NO_TOOLS,
    "web_search_options": "local models do not search the web; drop it",
}


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest, and UnsupportedFeature for what is legal in the dialect but not on a
    local model."""
    fields = check_body(ChatBody, body, _refuse)
    _check_features(fields)
    _check_combinations(fields)
    messages = tuple(_message(message, index) for index, message in enumerate(fields.messages))
    if messages[-1].role == "assistant":
        raise _invalid(
            f"messages[{len(messages) - 1}].role",
            "local models do not continue a partial assistant message; end with a user message",
        )
    return ChatRequest(
        model=fields.model,
        messages=messages,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        temperature=_or(fields.temperature, 1.0),
        top_k=fields.top_k if fields.top_k is not None and fields.top_k > 0 else None,
        top_p=max(_or(fields.top_p, 1.0), MIN_TOP_P),
        min_p=_or(fields.min_p, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=tuple((int(token), bias) for token, bias in (fields.logit_bias or {}).items()),
        num_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        seed=fields.seed,
        stop_strings=_stops(fields),
        num_completions=fields.n or 1,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
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


def _unsupported(param: str, message: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"Unsupported value for '{param}': {message}", param=param)


def _check_features(fields: ChatBody) -> None:
    for name, message in _REFUSED.items():
        if getattr(fields, name) not in (None, False, []):
            raise _unsupported(name, message)
    for name in ("tool_choice", "function_call"):
        if getattr(fields, name) not in (None, "none", "auto"):
            raise _unsupported(name, _NO_TOOLS)
    if fields.response_format is not None and fields.response_format.type != "text":
        raise _unsupported(
            "response_format",
            f'local models have no structured output, got "{fields.response_format.type}"; '
            "ask for JSON in the prompt",
        )
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise _unsupported("modalities", 'local models answer in text only; send ["text"]')


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
    if fields.stream_options is not None and not fields.stream:
        raise _invalid("stream_options", "only allowed when 'stream' is true")


def _stops(fields: ChatBody) -> tuple[str, ...]:
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if "" in stops:
        raise _invalid("stop", "expected stop strings of at least one character, got ''")
    check_stop_size(stops, "stop")
    return tuple(stops)


def _message(message: Message, index: int) -> ChatMessage:
    path = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise _unsupported(f"{path}.role", f'local models call no tools, got "{message.role}"')
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise _unsupported(f"{path}.{name}", "local models read text only; drop it")
    if message.content is None:
        raise _invalid(f"{path}.content", "expected a string or a list of text parts, got null")
    return ChatMessage(role, _text(message.content, f"{path}.content"))


def _text(content: str | list[TextPart | OtherPart], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, TextPart):
            raise _unsupported(
                f"{path}[{index}]",
                f'local models read text only, got a "{part.type}" part; drop it',
            )
        texts.append(part.text)
    return "\n".join(texts)
