"""The OpenAPI 3.1 description of the public routes, made from the schemas that check them. Built
once, served at /openapi.json."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.errors import RouterError
from router.protocols.anthropic import answers as claude_answers
from router.protocols.anthropic.encode import MAX_PAGE_SIZE
from router.protocols.anthropic.parse import CURRENT_VERSION, SAMPLING_VERSION
from router.protocols.anthropic.schema import CountTokensBody, MessagesBody
from router.protocols.openai import answers as openai_answers
from router.protocols.openai.schema import ChatBody

Json = dict[str, Any]

_CLAUDE, _OPENAI = "Claude", "OpenAI"
_MODELS: tuple[tuple[str, type[BaseModel]], ...] = (
    (_CLAUDE, MessagesBody),
    (_CLAUDE, CountTokensBody),
    (_OPENAI, ChatBody),
    (_CLAUDE, claude_answers.MessageAnswer),
    (_CLAUDE, claude_answers.TokenCount),
    (_CLAUDE, claude_answers.ModelCard),
    (_CLAUDE, claude_answers.ModelPage),
    (_CLAUDE, claude_answers.ErrorAnswer),
    (_OPENAI, openai_answers.ChatCompletion),
    (_OPENAI, openai_answers.ModelCard),
    (_OPENAI, openai_answers.ModelList),
    (_OPENAI, openai_answers.ErrorAnswer),
)
_KEY = "the API key of a team"
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": _KEY},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": _KEY},
}
_STREAMED = "the answer; with `stream` as server-sent events, which may end in an error"


async def serve_openapi(_request: Request) -> Response:
    return JSONResponse(openapi_document())


@cache
def openapi_document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Flashray",
            "version": "1",
            "description": "The Claude Messages API and the OpenAI chat API over one catalog.",
        },
        "security": [{name: []} for name in _SECURITY_SCHEMES],
        "paths": _paths(),
        "components": {"schemas": _schemas(), "securitySchemes": _SECURITY_SCHEMES},
    }


def _schemas() -> Json:
    """Both dialects have a Message and a Usage: component names carry the dialect."""
    schemas: Json = {}
    for dialect, model in _MODELS:
        schema = model.model_json_schema(ref_template=f"#/components/schemas/{dialect}{{model}}")
        parts = schema.pop("$defs", {})
        schemas |= {f"{dialect}{name}": part for name, part in parts.items()}
        schemas[f"{dialect}{model.__name__}"] = schema
    return schemas


def _paths() -> Json:
    return {
        "/v1/messages": {
            "post": _creates("createMessage", _CLAUDE, "MessagesBody", "MessageAnswer"),
        },
        "/v1/messages/count_tokens": {
            "post": _creates("countTokens", _CLAUDE, "CountTokensBody", "TokenCount"),
        },
        "/v1/chat/completions": {
            "post": _creates("createChatCompletion", _OPENAI, "ChatBody", "ChatCompletion"),
        },
        "/v1/models": {"get": _reads_models("listModels", "ModelPage", "ModelList", _PAGE)},
        "/v1/models/{model_id}": {
            "get": _reads_models("retrieveModel", "ModelCard", "ModelCard", _MODEL_ID)
        },
        "/v1/status": {"get": _reads("status", "object")},
        "/healthz": {"get": _reads("isAlive", "object") | {"security": []}},
        "/readyz": {"get": _readiness()},
        "/metrics": {"get": _metrics()},
    }


def _version_header(required: bool) -> Json:
    return {
        "name": "anthropic-version",
        "in": "header",
        "required": required,
        "schema": {"type": "string", "enum": [SAMPLING_VERSION, CURRENT_VERSION]},
    }


_MODEL_ID = [
    {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}},
]
_PAGE = [
    {
        "name": "limit",
        "in": "query",
        "description": "Claude dialect only, as are the cursors",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE},
    },
    {"name": "after_id", "in": "query", "schema": {"type": "string"}},
    {"name": "before_id", "in": "query", "schema": {"type": "string"}},
]


def _creates(operation_id: str, dialect: str, body: str, answer: str) -> Json:
    content = {"application/json": {"schema": _ref(dialect, answer)}}
    description = "the answer"
    if answer != "TokenCount":
        description = _STREAMED
        content["text/event-stream"] = {}
    return {
        "operationId": operation_id,
        "parameters": [_version_header(required=True)] if dialect == _CLAUDE else [],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(dialect, body)}},
        },
        "responses": {
            "200": {"description": description, "content": content},
            **_errors(_ref(dialect, "ErrorAnswer")),
        },
    }


def _reads_models(
    operation_id: str, claude_answer: str, openai_answer: str, parameters: list[Json]
) -> Json:
    """With the header `anthropic-version` in the Claude dialect, without it in the other."""
    answers = [_ref(_CLAUDE, claude_answer), _ref(_OPENAI, openai_answer)]
    return {
        "operationId": operation_id,
        "parameters": [_version_header(required=False), *parameters],
        "responses": {"200": _json({"anyOf": answers}), **_errors(_ANY_ERROR)},
    }


def _reads(operation_id: str, kind: str) -> Json:
    responses = {"200": _json({"type": kind}), **_errors(_ANY_ERROR)}
    return {"operationId": operation_id, "responses": responses}


def _readiness() -> Json:
    return {
        "operationId": "isReady",
        "security": [],
        "responses": {"200": _json({"type": "object"}), "503": _json({"type": "object"})},
    }


def _metrics() -> Json:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "operationId": "metrics",
        "security": [],
        "responses": {"200": {"description": "Prometheus text", "content": content}},
    }


def _ref(dialect: str, name: str) -> Json:
    return {"$ref": f"#/components/schemas/{dialect}{name}"}


_ANY_ERROR = {"anyOf": [_ref(_CLAUDE, "ErrorAnswer"), _ref(_OPENAI, "ErrorAnswer")]}


def _json(schema: Json) -> Json:
    return {"description": "the answer", "content": {"application/json": {"schema": schema}}}


def _errors(schema: Json) -> Json:
    return {
        str(status): {
            "description": names,
            "content": {"application/json": {"schema": schema}},
        }
        for status, names in sorted(_error_names().items())
    }


def _error_names() -> dict[int, str]:
    names: dict[int, list[str]] = {}
    for error in _error_types(RouterError):
        names.setdefault(error.status, [])
        if error.anthropic_type not in names[error.status]:
            names[error.status].append(error.anthropic_type)
    return {status: ", ".join(types) for status, types in names.items()}


def _error_types(root: type[RouterError]) -> Iterator[type[RouterError]]:
    yield root
    for child in root.__subclasses__():
        yield from _error_types(child)
