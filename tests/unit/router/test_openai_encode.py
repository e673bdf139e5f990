"""Answers in the OpenAI dialect, as bytes and as the official SDK reads them."""

import json
import math
from pathlib import Path

import httpx2
import openai
import pytest

from router.completion import Completion
from router.errors import BackendError, ModelNotFound, Overloaded
from router.events import Finished, Started, TextDelta, TextLogprobs
from router.generation import FinishReason, Usage
from router.protocols.openai import answers, encode
from router.protocols.openai.encode import ChatCompletionStream
from router.sse.codec import encode_event

TRANSCRIPTS = Path(__file__).parents[2] / "fixtures" / "sse"
CREATED = 1_790_000_000
QUESTION = {"model": "local", "messages": [{"role": "user", "content": "Hi"}]}


def started(cached_tokens=0):
    return Started(Usage(prompt_tokens=40, cached_tokens=cached_tokens, completion_tokens=0))


def finished(reason, completion_tokens, cached_tokens=0):
    return Finished(reason, Usage(40, cached_tokens, completion_tokens))


FOX = "🦊".encode()
STREAMS = {
    "openai_text": [
        (0, started()),
        (0, TextDelta("Grüße, ")),
        (0, TextDelta("")),
        (0, TextDelta('世界\n"</system>"')),
        (0, finished(FinishReason.STOP_TOKEN, 7)),
    ],
    "openai_usage": [
        (0, started(cached_tokens=32)),
        (0, TextDelta("One")),
        (0, finished(FinishReason.LENGTH, 3, cached_tokens=32)),
    ],
    "openai_two_choices": [
        (0, started()),
        (1, started(cached_tokens=39)),
        (1, TextDelta("b", (TextLogprobs("b", b"b", -0.5, (("b", b"b", -0.5),)),))),
        (0, TextDelta("", (TextLogprobs("\ufffd", FOX[:2], -1.25),))),
        (1, finished(FinishReason.STOP_STRING, 1, cached_tokens=39)),
        (0, TextDelta("🦊", (TextLogprobs("\ufffd", FOX[2:], -math.inf),))),
        (0, finished(FinishReason.STOP_TOKEN, 3)),
    ],
    "openai_no_text": [(0, started()), (0, finished(FinishReason.LENGTH, 0))],
}
WITH_USAGE = {"openai_usage", "openai_two_choices"}


def num_completions(events):
    return 1 + max(choice for choice, _ in events)


def fold(name):
    events = STREAMS[name]
    stream = ChatCompletionStream(
        "chatcmpl-1", "local", CREATED, num_completions(events), name in WITH_USAGE
    )
    sent = [sent for choice, event in events for sent in stream.encode(choice, event)]
    return b"".join(map(encode_event, sent))


def whole(events):
    completions = [Completion() for _ in range(num_completions(events))]
    for choice, event in events:
        completions[choice].add(event)
    body = encode.completion_body("chatcmpl-1", "local", CREATED, completions)
    answers.ChatCompletion.model_validate(body)
    return body


def chunks_of(wire):
    payloads = [line.removeprefix(b"data: ") for line in wire.split(b"\n\n") if line]
    assert payloads.pop() == b"[DONE]"
    return [json.loads(payload) for payload in payloads]


def client_of(content, status=200, media_type="text/event-stream"):
    """The official client, reading `content` seven bytes at a time."""
    chunks = [content[start : start + 7] for start in range(0, len(content), 7)]

    def answer(_request):
        return httpx2.Response(status, headers={"content-type": media_type}, content=iter(chunks))

    return openai.OpenAI(
        api_key="key",
        base_url="http://router.test/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
    )


def as_json(body):
    return json.dumps(body).encode()


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_the_transcripts(name):
    assert fold(name) == (TRANSCRIPTS / f"{name}.sse").read_bytes()


@pytest.mark.parametrize("name", STREAMS)
def test_the_sdk_reads_a_stream_as_the_whole_completion(name):
    expected = whole(STREAMS[name])
    extras = {"stream_options": {"include_usage": True}} if name in WITH_USAGE else {}
    if name == "openai_two_choices":
        extras |= {"n": 2, "logprobs": True}
    client = client_of((TRANSCRIPTS / f"{name}.sse").read_bytes())
    with client, client.chat.completions.stream(**QUESTION, **extras) as stream:
        # `get_final_completion` would raise for a completion that was cut short.
        completion = stream.until_done().current_completion_snapshot
    read = completion.model_dump()
    for choice, whole_choice in zip(read["choices"], expected["choices"], strict=True):
        assert choice["index"] == whole_choice["index"]
        assert choice["message"]["content"] == whole_choice["message"]["content"]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == whole_choice["finish_reason"]
        if whole_choice["logprobs"]:
            assert choice["logprobs"]["content"] == whole_choice["logprobs"]["content"]
    if name in WITH_USAGE:
        usage = completion.usage.model_dump(exclude_unset=True)
        assert usage == expected["usage"]


@pytest.mark.parametrize("name", STREAMS)
def test_the_sdk_reads_a_whole_completion(name):
    body = whole(STREAMS[name])
    with client_of(as_json(body), media_type="application/json") as client:
        completion = client.chat.completions.create(**QUESTION)
    assert completion.model_dump(exclude_unset=True) == body


def test_usage_is_null_on_every_chunk_but_the_last():
    *chunks, last = chunks_of(fold("openai_usage"))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 3,
        "total_tokens": 43,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    assert all("usage" not in chunk for chunk in chunks_of(fold("openai_text")))


def test_a_prompt_counts_once_for_all_its_completions():
    usage = whole(STREAMS["openai_two_choices"])["usage"]
    assert usage["prompt_tokens"] == 40
    assert usage["completion_tokens"] == 4
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert chunks_of(fold("openai_two_choices"))[-1]["usage"] == usage


def test_every_choice_opens_with_its_role_and_the_stream_ends_once():
    wire = fold("openai_two_choices")
    roles = [
        choice["index"]
        for chunk in chunks_of(wire)
        for choice in chunk["choices"]
        if "role" in choice["delta"]
    ]
    assert roles == [0, 1]
    assert wire.count(b"[DONE]") == 1
    assert wire.endswith(b"data: [DONE]\n\n")


def test_probability_zero_is_still_json():
    content = whole(STREAMS["openai_two_choices"])["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [-1.25, -9999.0]
    assert bytes(byte for token in content for byte in token["bytes"]) == FOX


@pytest.mark.parametrize(
    ("reason", "finish_reason"),
    [
        (FinishReason.STOP_TOKEN, "stop"),
        (FinishReason.STOP_STRING, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CONTEXT_WINDOW, "length"),
    ],
)
def test_every_way_to_end_has_its_name(reason, finish_reason):
    events = [(0, started()), (0, finished(reason, 1))]
    assert whole(events)["choices"][0]["finish_reason"] == finish_reason
    stream = ChatCompletionStream("chatcmpl-1", "local", CREATED, 1, include_usage=False)
    finish, done = stream.encode(0, events[1][1])
    assert json.loads(finish.data)["choices"][0]["finish_reason"] == finish_reason
    assert done.data == "[DONE]"


def test_an_aborted_generation_is_an_error_not_a_completion():
    aborted = finished(FinishReason.ABORT, 1)
    with pytest.raises(BackendError, match="aborted"):
        whole([(0, started()), (0, aborted)])
    with pytest.raises(BackendError, match="aborted"):
        whole([(0, started())])
    stream = ChatCompletionStream("chatcmpl-1", "local", CREATED, 1, include_usage=True)
    (sent,) = stream.encode(0, aborted)
    assert "aborted" in json.loads(sent.data)["error"]["message"]


def test_an_error_ends_a_stream_and_reaches_the_reader_of_the_sdk():
    stream = ChatCompletionStream("chatcmpl-1", "local", CREATED, 1, include_usage=False)
    events = [
        *stream.encode(0, started()),
        *stream.encode(0, TextDelta("x")),
        *stream.error(Overloaded("all replicas are busy")),
    ]
    wire = b"".join(map(encode_event, events))
    assert wire == (TRANSCRIPTS / "openai_error.sse").read_bytes()
    assert b"[DONE]" not in wire
    client = client_of(wire)
    with client, pytest.raises(openai.APIError, match="all replicas are busy"):
        list(client.chat.completions.create(**QUESTION, stream=True))


def test_error_bodies_are_those_of_the_sdk():
    body = encode.error_body(ModelNotFound("model: 'x' is not served here", param="model"))
    client = client_of(as_json(body), 404, "application/json")
    with client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**QUESTION)
    error = caught.value
    assert (error.code, error.param, error.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )


def test_the_sdk_reads_models():
    cards = [encode.model_body(name, CREATED, "flashray") for name in ("a", "b")]
    body = encode.model_list_body(cards)
    answers.ModelList.model_validate(body)
    with client_of(as_json(body), media_type="application/json") as client:
        models = client.models.list().data
    assert [model.model_dump(exclude_unset=True) for model in models] == cards
    with client_of(as_json(cards[0]), media_type="application/json") as client:
        assert client.models.retrieve("a").created == CREATED
