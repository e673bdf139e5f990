"""The description of the API: complete, true to the code that checks and answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx
import jsonschema
import pytest

from router.errors import RouterError
from router.openapi import openapi_document
from router.protocols.anthropic import answers as claude_answers
from router.protocols.anthropic import encode as claude
from router.protocols.openai import answers as openai_answers
from router.protocols.openai import encode as openai
from tests.fakes.backend import FakeBackend
from tests.fakes.router import router_app

DOCUMENT = openapi_document()


def errors(root: type[RouterError] = RouterError) -> Iterator[type[RouterError]]:
    yield root
    for child in root.__subclasses__():
        yield from errors(child)


@pytest.fixture
async def client(smollm2_path: Path):
    transport = httpx.ASGITransport(router_app(smollm2_path, FakeBackend()))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def test_the_description_is_served_without_a_key(client):
    answer = await client.get("/openapi.json")
    assert (answer.status_code, answer.json()) == (200, DOCUMENT)


@pytest.mark.parametrize("path", DOCUMENT["paths"])
async def test_every_described_route_is_there_and_knows_its_methods(client, path: str):
    (method,) = (name.upper() for name in DOCUMENT["paths"][path])
    answer = await client.request("DELETE", path.replace("{model_id}", "x"))
    assert answer.status_code == 405
    assert method in answer.headers["allow"].replace(" ", "").split(",")


def test_every_reference_leads_somewhere():
    schemas = DOCUMENT["components"]["schemas"]
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        for reference in references(schema):
            assert reference.removeprefix("#/components/schemas/") in schemas, name


def references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from references(part)


@pytest.mark.parametrize("error_type", list(errors()), ids=lambda error_type: error_type.__name__)
def test_every_error_has_the_shape_that_is_described(error_type: type[RouterError]):
    error = error_type("why", param="field", details_code="code")
    claude_answers.ErrorAnswer.model_validate(claude.error_body(error, "req_1"))
    openai_answers.ErrorAnswer.model_validate(openai.error_body(error))
    for path in ("/v1/messages", "/v1/chat/completions"):
        assert str(error.status) in DOCUMENT["paths"][path]["post"]["responses"]


def test_no_error_is_described_that_cannot_happen():
    described = set(get_args(claude_answers.ErrorFields.model_fields["type"].annotation))
    assert described == {error_type.anthropic_type for error_type in errors()}
    described = set(get_args(openai_answers.ErrorFields.model_fields["type"].annotation))
    assert described == {error_type.openai_type for error_type in errors()}
