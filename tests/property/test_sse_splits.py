"""What is encoded comes back, wherever the bytes are cut."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from router.sse.codec import KEEP_ALIVE, EventDecoder, ServerSentEvent, encode_event

characters = st.characters(exclude_categories=["Cs"], exclude_characters="\r")
one_line = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"), min_size=1, max_size=8
)
events = st.builds(
    ServerSentEvent,
    data=st.text(characters, max_size=20),
    event=st.none() | one_line,
    id=st.none() | one_line,
)


def cut(wire, cuts):
    edges = [0, *sorted(position % (len(wire) + 1) for position in cuts), len(wire)]
    return [wire[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(events, max_size=5), st.lists(st.integers(0, 10_000), max_size=10), st.booleans())
@settings(max_examples=500, deadline=None)
def test_decode_of_encode_is_identity_under_any_split(sent, cuts, keep_alive):
    pause = KEEP_ALIVE if keep_alive else b""
    wire = b"".join(pause + encode_event(event) for event in sent)
    decoder = EventDecoder()
    received = [event for chunk in cut(wire, cuts) for event in decoder.decode(chunk)]
    assert received == sent


@given(st.lists(events, min_size=1, max_size=3), st.sampled_from(["\r", "\r\n"]))
@settings(max_examples=200, deadline=None)
def test_one_byte_at_a_time_with_other_line_ends(sent, line_end):
    wire = b"".join(encode_event(event) for event in sent).replace(b"\n", line_end.encode())
    decoder = EventDecoder()
    received = [event for byte in wire for event in decoder.decode(bytes([byte]))]
    assert received == sent
