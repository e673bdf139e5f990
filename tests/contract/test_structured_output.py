"""Structured output through the official SDKs, the real router and the real engine over random
weights: what comes is what the grammar says, since the model says nothing."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import anthropic
import jsonschema
import openai
import pydantic
import pytest
import torch

from deployments.in_process import serve_model
from tests.fakes.checkpoint import tiny_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["yes", "no"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["verdict", "score", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
CONFIG = {"format": {"type": "json_schema", "schema": SCHEMA}}
HELLO = [{"role": "user", "content": "Hello"}]
REGEX = "[A-Z][a-z]{2,6}, [0-9]{4}"
MAX_TOKENS = 3000  # every byte is a token, and random weights like blanks


class Answer(pydantic.BaseModel):
    verdict: bool
    score: int


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHRAY_CACHE", str(folder.parent / "cache"))
        tiny_checkpoint(folder, torch.float32, max_position_embeddings=4096)
        with serve_model(folder) as served:
            yield served


@pytest.fixture(scope="module")
def gpt(served):
    url = f"{served.url}/v1"
    with openai.OpenAI(base_url=url, api_key=served.api_key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served):
    with anthropic.Anthropic(base_url=served.url, api_key=served.api_key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(gpt) -> str:
    return next(iter(gpt.models.list())).id


def chat(gpt, model, **fields):
    fields = {"max_tokens": MAX_TOKENS, "messages": HELLO, **fields}
    return gpt.chat.completions.create(model=model, **fields)


def validate(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}, {"temperature": 2}])
def test_openai_schema(gpt, model, sampling):
    answer = chat(gpt, model, response_format=FORMAT, n=2, **sampling)
    for choice in answer.choices:
        validate(choice.message.content)
        assert choice.finish_reason == "stop"


def test_openai_stream(gpt, model):
    chunks = chat(gpt, model, response_format=FORMAT, stream=True)
    choices = [chunk.choices[0] for chunk in chunks]
    validate("".join(choice.delta.content or "" for choice in choices))
    assert choices[-1].finish_reason == "stop"


def test_openai_parses_into_a_type(gpt, model):
    answer = gpt.chat.completions.parse(
        model=model, messages=HELLO, max_tokens=MAX_TOKENS, response_format=Answer
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_openai_object(gpt, model):
    """Random weights find no end of it; what they find is the beginning of one."""
    answer = chat(gpt, model, response_format={"type": "json_object"}, max_tokens=40)
    (choice,) = answer.choices
    assert re.match(r'\{\s*("|\}|$)', choice.message.content)
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_openai_regex(gpt, model):
    answer = chat(gpt, model, extra_body={"structured_outputs": {"regex": REGEX}}, n=4)
    for choice in answer.choices:
        assert re.fullmatch(REGEX, choice.message.content)


def test_the_limit_comes_first(gpt, claude, model):
    (choice,) = chat(gpt, model, response_format=FORMAT, max_tokens=5).choices
    assert choice.finish_reason == "length"
    message = claude.messages.create(
        model=model, max_tokens=5, messages=HELLO, output_config=CONFIG
    )
    assert message.stop_reason == "max_tokens"


def test_claude_schema(claude, model):
    message = claude.messages.create(
        model=model, max_tokens=MAX_TOKENS, messages=HELLO, output_config=CONFIG
    )
    validate(message.content[0].text)
    assert message.stop_reason == "end_turn"


def test_claude_stream(claude, model):
    with claude.messages.stream(
        model=model, max_tokens=MAX_TOKENS, messages=HELLO, output_config=CONFIG
    ) as stream:
        validate("".join(stream.text_stream))
        assert stream.get_final_message().stop_reason == "end_turn"


def test_claude_parses_into_a_type(claude, model):
    message = claude.messages.parse(
        model=model, max_tokens=MAX_TOKENS, messages=HELLO, output_format=Answer
    )
    assert isinstance(message.parsed_output, Answer)


def test_the_model_card_says_so(claude, model):
    assert claude.models.retrieve(model).capabilities.structured_outputs.supported


MALFORMED = {"type": "object", "properties": {"a": {"type": "strin"}}}


def test_a_malformed_grammar_is_its_callers_error_alone(gpt, claude, model):
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": MALFORMED}}
    with ThreadPoolExecutor(12) as pool:
        good = [pool.submit(chat, gpt, model, response_format=FORMAT, seed=s) for s in range(8)]
        with pytest.raises(openai.BadRequestError) as chat_error:
            chat(gpt, model, response_format=bad)
        with pytest.raises(openai.BadRequestError, match="unclosed group"):
            chat(gpt, model, extra_body={"structured_outputs": {"regex": "("}}, stream=True)
        with pytest.raises(anthropic.BadRequestError) as message_error:
            claude.messages.create(
                model=model,
                max_tokens=9,
                messages=HELLO,
                output_config={"format": {"type": "json_schema", "schema": MALFORMED}},
            )
        for answer in good:
            validate(answer.result().choices[0].message.content)
    words = "this json_schema cannot be followed: Invalid type: strin; change it"
    assert chat_error.value.body["message"] == words
    assert chat_error.value.type == "invalid_request_error"
    assert message_error.value.body["error"]["message"] == words
    assert message_error.value.body["error"]["type"] == "invalid_request_error"
