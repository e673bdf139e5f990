"""What a body of the OpenAI dialect asks for that not every model can do, each with the words in
which a model refuses that cannot. Local models have structured output alone."""

import re

from router.capabilities import Capability, Feature, Features
from router.protocols.openai.schema import ChatBody, Message, TextPart

_NO_TOOLS = "local models call no tools; drop it"
_FIELDS = {
    "audio": (Capability.AUDIO, "local models answer in text only; drop it"),
    "functions": (Capability.TOOLS, _NO_TOOLS),
    "moderation": (Capability.MODERATION, "nothing is moderated here; drop it"),
    "prediction": (Capability.PREDICTION, "local models take no predicted output; drop it"),
    "store": (Capability.STORE, "completions are not stored here; drop it or send false"),
    "tools": (Capability.TOOLS, _NO_TOOLS),
    "web_search_options": (Capability.WEB_SEARCH, "local models do not search the web; drop it"),
}
_MESSAGE_FIELDS = {
    "tool_calls": Capability.TOOLS,
    "function_call": Capability.TOOLS,
    "audio": Capability.AUDIO,
    "refusal": Capability.REFUSALS,
}
PART_CAPABILITIES = {
    "file": Capability.DOCUMENTS,
    "image_url": Capability.IMAGES,
    "input_audio": Capability.AUDIO,
    "refusal": Capability.REFUSALS,
}
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def is_token_id(key: str) -> bool:
    return _TOKEN_ID.fullmatch(key) is not None


def chat_features(fields: ChatBody) -> Features:
    features = Features()
    for name, (capability, advice) in _FIELDS.items():
        if getattr(fields, name) not in (None, False, []):
            _add(features, capability, name, advice)
    for name in ("tool_choice", "function_call"):
        if getattr(fields, name) not in (None, "none", "auto"):
            _add(features, Capability.TOOLS, name, _NO_TOOLS)
    _output(fields, features)
    for token in fields.logit_bias or ():
        if not is_token_id(token):
            _add(
                features,
                Capability.TEXT_LOGIT_BIAS,
                "logit_bias",
                f"local models take the ids of tokens, got {token[:40]!r}",
            )
    for index, message in enumerate(fields.messages):
        _message(message, f"messages[{index}]", features)
    if fields.messages[-1].role == "assistant":
        _add(
            features,
            Capability.PREFILL,
            f"messages[{len(fields.messages) - 1}].role",
            "local models do not continue a partial assistant message; end with a user message",
        )
    return features


def _add(features: Features, capability: Capability, param: str, message: str) -> None:
    features.add(Feature(capability, param, f"Unsupported value for '{param}': {message}"))


def _output(fields: ChatBody, features: Features) -> None:
    if fields.response_format is not None and fields.response_format.type != "text":
        _add(
            features,
            Capability.STRUCTURED_OUTPUT,
            "response_format",
            f'this model has no structured output, got "{fields.response_format.type}"; '
            "ask for JSON in the prompt",
        )
    if fields.structured_outputs is not None:
        _add(
            features,
            Capability.STRUCTURED_OUTPUT,
            "structured_outputs",
            "this model has no structured output; drop it",
        )
    if fields.modalities is not None and fields.modalities != ["text"]:
        _add(
            features,
            Capability.AUDIO,
            "modalities",
            'local models answer in text only; send ["text"]',
        )


def _message(message: Message, path: str, features: Features) -> None:
    if message.role in ("tool", "function"):
        _add(
            features,
            Capability.TOOLS,
            f"{path}.role",
            f'local models call no tools, got "{message.role}"',
        )
    for name, capability in _MESSAGE_FIELDS.items():
        if getattr(message, name):
            _add(features, capability, f"{path}.{name}", "local models read text only; drop it")
    if message.content is None or isinstance(message.content, str):
        return
    for index, part in enumerate(message.content):
        if not isinstance(part, TextPart):
            _add(
                features,
                PART_CAPABILITIES[part.type],
                f"{path}.content[{index}]",
                f'local models read text only, got a "{part.type}" part; drop it',
            )
