"""Answers in the Claude dialect, as bytes and as the official SDK reads them."""

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import anthropic
import httpx2
import pytest

from router.capabilities import Capability
from router.completion import Completion
from router.errors import BackendError, InvalidRequest, Overloaded, UnsupportedFeature
from router.events import Finished, Started, TextDelta
from router.generation import FinishReason, Usage
from router.protocols.anthropic import answers, encode
from router.protocols.anthropic.encode import MessageStream
from router.sse.codec import encode_event

TRANSCRIPTS = Path(__file__).parents[2] / "fixtures" / "sse"
QUESTION = {"model": "local", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


def started(cached_tokens=0):
    return Started(Usage(prompt_tokens=40, cached_tokens=cached_tokens, completion_tokens=0))


def finished(reason, completion_tokens, stop_string=None, cached_tokens=0):
    return Finished(reason, Usage(40, cached_tokens, completion_tokens), stop_string)


STREAMS = {
    "anthropic_text": [
        started(cached_tokens=32),
        TextDelta("Grüße, "),
        TextDelta(""),
        TextDelta('世界 🦊\n"</system>"\u2028'),
        finished(FinishReason.STOP_TOKEN, 7, cached_tokens=32),
    ],
    "anthropic_stop_sequence": [
        started(),
        TextDelta("One"),
        finished(FinishReason.STOP_STRING, 3, stop_string="\n\nHuman:"),
    ],
    "anthropic_no_text": [started(), finished(FinishReason.LENGTH, 0)],
    "anthropic_context_window": [
        started(),
        TextDelta("and so on"),
        finished(FinishReason.CONTEXT_WINDOW, 5),
    ],
}


def fold(events, model="local"):
    stream = MessageStream("msg_1", model)
    return b"".join(encode_event(sent) for event in events for sent in stream.encode(0, event))


def whole(events):
    completion = Completion()
    for event in events:
        completion.add(event)
    body = encode.message_body("msg_1", "local", completion)
    answers.MessageAnswer.model_validate(body)
    return body


def client_of(content, status=200, media_type="text/event-stream"):
    """The official client, reading `content` seven bytes at a time."""
    chunks = [content[start : start + 7] for start in range(0, len(content), 7)]

    def answer(_request):
        return httpx2.Response(status, headers={"content-type": media_type}, content=iter(chunks))

    return anthropic.Anthropic(
        api_key="key",
        base_url="http://router.test",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
    )


def as_json(body):
    return json.dumps(body).encode()


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_the_transcripts(name):
    assert fold(STREAMS[name]) == (TRANSCRIPTS / f"{name}.sse").read_bytes()


@pytest.mark.parametrize("name", STREAMS)
def test_the_sdk_reads_a_stream_as_the_whole_message(name):
    client = client_of((TRANSCRIPTS / f"{name}.sse").read_bytes())
    with client, client.messages.stream(**QUESTION) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "" not in texts
    expected = anthropic.types.Message.model_validate(whole(STREAMS[name]))
    assert message.model_dump(exclude_unset=True, exclude={"stop_details"}) == (
        expected.model_dump(exclude_unset=True)
    )
    assert "".join(texts) == "".join(block.text for block in expected.content)


@pytest.mark.parametrize("name", STREAMS)
def test_the_sdk_reads_a_whole_message(name):
    body = whole(STREAMS[name])
    with client_of(as_json(body), media_type="application/json") as client:
        message = client.messages.create(**QUESTION)
    assert message.model_dump(exclude_unset=True) == body


def test_cached_tokens_are_counted_apart():
    usage = whole(STREAMS["anthropic_text"])["usage"]
    assert usage == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 32,
        "output_tokens": 7,
    }


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [
        (FinishReason.STOP_TOKEN, "end_turn"),
        (FinishReason.STOP_STRING, "stop_sequence"),
        (FinishReason.LENGTH, "max_tokens"),
        (FinishReason.CONTEXT_WINDOW, "model_context_window_exceeded"),
    ],
)
def test_every_way_to_end_has_its_name(reason, stop_reason):
    events = [started(), TextDelta("x"), finished(reason, 1)]
    assert whole(events)["stop_reason"] == stop_reason
    assert f'"stop_reason":"{stop_reason}"'.encode() in fold(events)


def test_an_aborted_generation_is_an_error_not_a_message():
    events = [started(), TextDelta("x"), finished(FinishReason.ABORT, 1)]
    with pytest.raises(BackendError, match="aborted"):
        whole(events)
    with pytest.raises(BackendError, match="aborted"):
        whole(events[:2])
    wire = fold(events)
    assert wire.count(b"event: error\n") == 1
    assert b"message_stop" not in wire


def test_an_error_ends_a_stream_and_reaches_the_reader_of_the_sdk():
    stream = MessageStream("msg_1", "local")
    events = [
        *stream.encode(0, started()),
        *stream.encode(0, TextDelta("x")),
        *stream.error(Overloaded("all replicas are busy")),
    ]
    wire = b"".join(map(encode_event, events))
    assert wire == (TRANSCRIPTS / "anthropic_error.sse").read_bytes()
    client = client_of(wire)
    with (
        client,
        client.messages.stream(**QUESTION) as messages,
        pytest.raises(anthropic.APIStatusError, match="all replicas are busy"),
    ):
        messages.until_done()


def test_replaying_a_stream_repeats_its_bytes():
    assert fold(STREAMS["anthropic_text"]) == fold(STREAMS["anthropic_text"])


def test_error_bodies_are_those_of_the_sdk():
    error = InvalidRequest("max_tokens: Field required", param="max_tokens")
    body = encode.error_body(error, "req_1")
    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "max_tokens: Field required"},
        "request_id": "req_1",
    }
    client = client_of(as_json(body), 400, "application/json")
    with client, pytest.raises(anthropic.BadRequestError, match="Field required"):
        client.messages.create(**QUESTION)


def test_the_sdk_knows_a_refused_thread_by_its_code():
    error = UnsupportedFeature("thread: no", details_code="thread_unsupported_request")
    body = encode.error_body(error, "req_1")
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    client = client_of(as_json(body), 400, "application/json")
    with client, pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**QUESTION)
    assert type(caught.value).__name__ == "ThreadUnsupportedRequestError"


def test_the_sdk_reads_a_token_count():
    client = client_of(as_json(encode.count_tokens_body(17)), media_type="application/json")
    with client:
        count = client.messages.count_tokens(model="local", messages=QUESTION["messages"])
    assert count.input_tokens == 17


def card(model_id):
    return encode.model_body(
        model_id, model_id.title(), datetime(2026, 1, 2, tzinfo=UTC), 8192, 512
    )


CARDS = [card(f"model-{number}") for number in range(5)]


def test_a_model_card_says_when_in_utc():
    east = timezone(timedelta(hours=2))
    body = encode.model_body("m", "M", datetime(2026, 1, 2, 1, tzinfo=east), 8192, 512)
    assert body["created_at"] == "2026-01-01T23:00:00Z"
    client = client_of(as_json(body), media_type="application/json")
    with client:
        model = client.models.retrieve("m")
    assert (model.id, model.max_input_tokens, model.max_tokens) == ("m", 8192, 512)
    assert model.lifecycle == "active"
    assert model.capabilities is not None
    assert not model.capabilities.image_input.supported


def test_a_model_card_says_what_the_model_can_do():
    can = frozenset({Capability.IMAGES, Capability.THINKING})
    body = encode.model_body("m", "M", datetime(2026, 1, 2, tzinfo=UTC), 8192, 512, can)
    with client_of(as_json(body), media_type="application/json") as client:
        capabilities = client.models.retrieve("m").capabilities
    assert capabilities.image_input.supported
    assert capabilities.thinking.types.adaptive.supported
    assert not capabilities.structured_outputs.supported
    assert not capabilities.server_tools.web_search.supported


@pytest.mark.parametrize(
    ("page", "numbers", "has_more"),
    [
        ({}, [0, 1, 2, 3, 4], False),
        ({"limit": 2}, [0, 1], True),
        ({"limit": 2, "after_id": "model-1"}, [2, 3], True),
        ({"limit": 2, "after_id": "model-2"}, [3, 4], False),
        ({"after_id": "model-4"}, [], False),
        ({"limit": 2, "before_id": "model-3"}, [1, 2], True),
        ({"limit": 3, "before_id": "model-3"}, [0, 1, 2], False),
        ({"before_id": "model-0"}, [], False),
        ({"after_id": "model-0", "before_id": "model-4"}, [1, 2, 3], False),
        ({"limit": 2, "after_id": "model-0", "before_id": "model-4"}, [1, 2], True),
        ({"after_id": "model-3", "before_id": "model-1"}, [], False),
    ],
)
def test_pages_of_models(page, numbers, has_more):
    body = encode.model_list_body(CARDS, **page)
    answers.ModelPage.model_validate(body)
    ids = [f"model-{number}" for number in numbers]
    assert [model["id"] for model in body["data"]] == ids
    assert body["has_more"] is has_more
    assert (body["first_id"], body["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    ("page", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"after_id": "nobody"}, "after_id"),
        ({"before_id": "nobody"}, "before_id"),
        ({"after_id": "model-1", "before_id": "nobody"}, "before_id"),
    ],
)
def test_impossible_pages_are_refused(page, param):
    with pytest.raises(InvalidRequest) as caught:
        encode.model_list_body(CARDS, **page)
    assert caught.value.param == param


def test_the_sdk_walks_all_pages():
    def answer(request):
        after_id = request.url.params.get("after_id")
        return httpx2.Response(200, json=encode.model_list_body(CARDS, 2, after_id))

    with anthropic.Anthropic(
        api_key="key",
        base_url="http://router.test",
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
    ) as client:
        assert [model.id for model in client.models.list()] == [model["id"] for model in CARDS]
