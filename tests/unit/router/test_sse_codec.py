"""Server-sent events: exact bytes, and the awkward streams of the specification."""

import pytest

from router.errors import BackendError
from router.sse.codec import KEEP_ALIVE, EventDecoder, ServerSentEvent, encode_event


def test_encodes_fields_in_order_and_ends_with_a_blank_line():
    event = ServerSentEvent("a\nb", event="message_start", id="7")
    assert encode_event(event) == b"event: message_start\nid: 7\ndata: a\ndata: b\n\n"


def test_keep_alive_is_one_line_and_decodes_to_nothing():
    assert KEEP_ALIVE == b": ka\n"
    assert EventDecoder().decode(KEEP_ALIVE + b"data: x\n\n") == [ServerSentEvent("x")]


@pytest.mark.parametrize(
    ("wire", "events"),
    [
        (b"data: x\r\n\r\n", [ServerSentEvent("x")]),
        (b"data: x\r\r", [ServerSentEvent("x")]),
        (b"\xef\xbb\xbfdata: x\n\n", [ServerSentEvent("x")]),
        (b"data\n\n", [ServerSentEvent("")]),
        (b"data:x\ndata:  y\n\n", [ServerSentEvent("x\n y")]),
        (b"event: ping\n\n", []),
        (b"event: ping\n\ndata: x\n\n", [ServerSentEvent("x")]),
        (b"event:\ndata: x\n\n", [ServerSentEvent("x")]),
        (b"retry: 10\nunknown: y\ndata: x\n\n", [ServerSentEvent("x")]),
        (b"id: a\0b\ndata: x\n\n", [ServerSentEvent("x")]),
        (b"data: unfinished\n", []),
        (b": \n\n: ka\n\n", []),
    ],
)
def test_decodes_as_the_specification_says(wire, events):
    assert EventDecoder().decode(wire) == events


def test_the_last_id_stays_while_an_event_has_only_its_own():
    decoder = EventDecoder()
    assert decoder.decode(b"id: 1\ndata: x\n\ndata: y\n\n") == [
        ServerSentEvent("x", id="1"),
        ServerSentEvent("y"),
    ]
    assert decoder.last_event_id == "1"


def test_a_return_and_a_newline_in_two_chunks_are_one_line_end():
    decoder = EventDecoder()
    assert decoder.decode(b"data: x\r") == []
    assert decoder.decode(b"\ndata: y\r") == []
    assert decoder.decode(b"\n\r\n") == [ServerSentEvent("x\ny")]


def test_an_endless_event_is_refused_and_many_small_ones_are_not():
    decoder = EventDecoder(max_event_characters=100)
    for _ in range(100):
        assert decoder.decode(b": ka\ndata: 123456789\n\n") == [ServerSentEvent("123456789")]
    assert decoder.decode(b"data: 123456789\n" * 11) == []
    with pytest.raises(BackendError, match="at most 100 characters"):
        decoder.decode(b"data: 123456789\n")
    with pytest.raises(BackendError, match="at most 100 characters"):
        EventDecoder(max_event_characters=100).decode(b"x" * 101)


@pytest.mark.parametrize(
    "fields",
    [
        {"data": "a\rb"},
        {"data": "", "event": "a\nb"},
        {"data": "", "id": "a\0"},
        {"data": "", "id": "a\r"},
    ],
)
def test_text_the_wire_cannot_carry_is_refused(fields):
    with pytest.raises(ValueError, match="expected"):
        ServerSentEvent(**fields)
