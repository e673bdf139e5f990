"""A ring of bytes: what is read is what was written, or a refusal, never a gap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import NotFound
from router.sse.replay_log import ReplayLog


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_rest_of_a_stream():
    log = ReplayLog()
    log.append("a", "red", b"one")
    log.append("a", "red", b"two")
    first = log.read("a", "red")
    assert (first.content, first.end_byte, first.is_complete) == (b"onetwo", 6, False)
    log.append("a", "red", b"three")
    log.complete("a")
    rest = log.read("a", "red", first.end_byte)
    assert (rest.content, rest.is_complete) == (b"three", True)
    assert log.read("a", "red", 11).content == b""


@pytest.mark.parametrize(
    ("request_id", "owner", "after_byte"),
    [("b", "red", 0), ("a", "blue", 0), ("a", "red", 4), ("a", "red", -1)],
)
def test_unknown_streams_owners_and_offsets(request_id: str, owner: str, after_byte: int):
    log = ReplayLog()
    log.append("a", "red", b"one")
    with pytest.raises(NotFound):
        log.read(request_id, owner, after_byte)


def test_the_oldest_bytes_go_first_and_their_readers_are_told():
    log = ReplayLog(max_stream_bytes=6)
    for chunk in (b"abc", b"def", b"ghi"):
        log.append("a", "red", chunk)
    assert log.read("a", "red", 3).content == b"defghi"
    with pytest.raises(NotFound, match="from 3 to 9"):
        log.read("a", "red", 2)


def test_a_chunk_larger_than_the_ring_leaves_nothing():
    log = ReplayLog(max_stream_bytes=4)
    log.append("a", "red", b"12345")
    assert log.num_bytes == 0
    assert log.read("a", "red", 5).content == b""


def test_streams_expire_after_their_last_byte():
    clock = Clock()
    log = ReplayLog(ttl_s=10, clock=clock)
    log.append("a", "red", b"one")
    clock.now_s = 6
    log.append("a", "red", b"two")
    log.append("b", "red", b"x")
    clock.now_s = 15
    assert log.read("a", "red").content == b"onetwo"
    clock.now_s = 16
    with pytest.raises(NotFound):
        log.read("a", "red")
    assert log.num_bytes == 0


def test_all_streams_together_are_bounded():
    log = ReplayLog(max_total_bytes=10)
    for request_id in "abc":
        log.append(request_id, "red", b"1234")
    with pytest.raises(NotFound):
        log.read("a", "red")
    assert log.read("b", "red").content == log.read("c", "red").content == b"1234"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.binary(min_size=1, max_size=9)), max_size=60),
    st.integers(1, 30),
)
def test_what_is_read_is_the_end_of_what_was_written(writes, max_stream_bytes: int):
    log = ReplayLog(max_stream_bytes=max_stream_bytes, max_total_bytes=1000)
    written = {"a": b"", "b": b""}
    for request_id, chunk in writes:
        log.append(request_id, "red", chunk)
        written[request_id] += chunk
    for request_id, content in written.items():
        for after in range(len(content) + 1):
            try:
                replay = log.read(request_id, "red", after)
            except NotFound:
                continue
            assert replay.content == content[after:]
            assert len(replay.content) <= max_stream_bytes
    assert log.num_bytes <= 2 * max_stream_bytes
