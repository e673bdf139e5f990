"""What our own description promises, tried with requests made from it and against it: no server
error, and every answer in the shape of its dialect."""

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.types import ASGIApp

from router.openapi import openapi_document
from router.protocols.anthropic.answers import ErrorAnswer as ClaudeError
from router.protocols.openai.answers import ErrorAnswer as OpenAIError
from tests.conformance.run import conforming_app
from tests.conformance.suites import KEYS, MODEL_NAMES
from tests.fakes.backend import FakeBackend
from tests.fakes.router import KEY, MODEL, router_app

PATHS = openapi_document()["paths"]
CREATES = [path for path in PATHS if "post" in PATHS[path]]
READS = [path for path in PATHS if "get" in PATHS[path]]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@dataclasses.dataclass(frozen=True)
class Router:
    """`schema` is the description as the app itself serves it."""

    schema: Any
    key: str
    model: str

    @classmethod
    def of(cls, app: ASGIApp, key: str, model: str) -> "Router":
        return cls(schemathesis.openapi.from_asgi("/openapi.json", app), key, model)


@pytest.fixture(scope="module")
def local(smollm2_path: Path) -> Router:
    """Its model can do nothing but text."""
    return Router.of(router_app(smollm2_path, FakeBackend(token_ids=(504, 2))), KEY, MODEL)


@pytest.fixture(scope="module")
def capable(smollm2_path: Path) -> Router:
    return Router.of(conforming_app(smollm2_path), KEYS[0], MODEL_NAMES[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", CREATES)
def test_bodies_for_a_model_of_text_only(local: Router, path: str, mode: GenerationMode):
    statuses = fuzz(local, "POST", path, mode, num_examples=40)
    assert statuses.keys() <= {200, 400}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", CREATES)
def test_bodies_for_a_model_of_everything(capable: Router, path: str, mode: GenerationMode):
    statuses = fuzz(capable, "POST", path, mode, num_examples=40)
    assert statuses.keys() <= {200, 400}
    if mode is GenerationMode.POSITIVE:
        assert statuses[200] >= 5


@pytest.mark.parametrize("path", READS)
def test_reads(local: Router, path: str):
    statuses = fuzz(local, "GET", path, GenerationMode.POSITIVE, num_examples=20)
    assert statuses.keys() <= {200, 400, 404}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model_id}"])
def test_reads_with_what_is_not_described(local: Router, path: str):
    statuses = fuzz(local, "GET", path, GenerationMode.NEGATIVE, num_examples=20)
    assert statuses.keys() <= {200, 400, 404}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", path) for path in CREATES] + [("GET", path) for path in READS if "/v1/" in path],
)
def test_nothing_is_answered_without_a_key(local: Router, method: str, path: str):
    operation = local.schema[path][method]
    body = {"body": {}} if method == "POST" else {}
    case = operation.Case(path_parameters={"model_id": MODEL}, **body)
    response = case.call()
    assert response.status_code == 401
    case.validate_response(response, checks=CHECKS)
    error_shape(case).model_validate_json(response.content)


def fuzz(
    router: Router, method: str, path: str, mode: GenerationMode, num_examples: int
) -> "collections.Counter[int]":
    """How often each status was answered."""
    operation = router.schema[path][method]
    statuses: collections.Counter[int] = collections.Counter()

    @bounded(num_examples)
    @given(case=operation.as_strategy(generation_mode=mode), is_plain=booleans())
    def check(case: Case, is_plain: bool) -> None:
        prepare(case, router, is_plain)
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            error_shape(case).model_validate_json(response.content)

    check()
    return statuses


def bounded(num_examples: int) -> Callable[[Any], Any]:
    """The same examples in every run."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def prepare(case: Case, router: Router, is_plain: bool) -> None:
    """Random keys, model names and limits would meet 401, 404 and the context's length only; a
    plain conversation lets the other fields be met."""
    for name in ("x-api-key", "authorization"):
        case.headers.pop(name, None)
    case.headers["authorization"] = f"Bearer {router.key}"
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str) and case.body["model"]:
            case.body["model"] = router.model
        if is_plain and case.body.get("messages"):
            case.body["messages"] = [{"role": "user", "content": "Hello"}]
        for name in ("max_tokens", "max_completion_tokens"):
            if type(case.body.get(name)) is int and case.body[name] > 0:
                case.body[name] = 8


def error_shape(case: Case) -> type[ClaudeError] | type[OpenAIError]:
    if case.path.startswith("/v1/messages"):
        return ClaudeError
    return ClaudeError if "anthropic-version" in case.headers else OpenAIError
