"""The channel between a shell and a rank, over the real engine and a real socket."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from deployments.rank_channel import Channel, ChannelEnd
from engine.errors import DuplicateSequence, EngineStopped, PromptTooLong
from engine.sampling_params import SamplingParams
from tests.fakes.executor import FakeExecutor, expected_completion
from tests.fakes.rank import BLOCK_SIZE, VOCAB_SIZE, InProcessRank

PROMPT = tuple(range(1, 21))
GREEDY = SamplingParams(40, temperature=0.0)


@contextlib.asynccontextmanager
async def connected(executor: FakeExecutor | None = None):
    rank = InProcessRank(executor)
    end = ChannelEnd(rank.engine)
    channel = Channel(end.path, lambda: "the rank died")
    try:
        yield channel, rank, end
    finally:
        rank.engine.shutdown(10)
        channel.close()
        await asyncio.sleep(0.01)  # the reader sees it


async def read(channel: Channel, num_ends: int) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    async with asyncio.timeout(10):
        while num_ends:
            for step in await channel.next_outputs():
                for output in step.outputs:
                    tokens.setdefault(output.seq_id, []).extend(output.token_ids)
                    num_ends -= output.finish_reason is not None
    return tokens


async def test_sequences_go_there_and_outputs_come_back():
    async with connected() as (channel, _, _):
        names = [f"s{number}" for number in range(8)]
        reading = asyncio.create_task(read(channel, len(names)))
        await asyncio.gather(*(channel.add(name, PROMPT, GREEDY) for name in names))
        expected = expected_completion(PROMPT, 40, VOCAB_SIZE)
        assert await reading == dict.fromkeys(names, expected)


async def test_a_refusal_is_its_callers_alone():
    async with connected() as (channel, _, _):
        await channel.add("long", PROMPT, SamplingParams(400, temperature=0.0))
        for name, prompt, error in (
            ("long", PROMPT, DuplicateSequence),
            ("wide", tuple(range(1, 90)) * 9, PromptTooLong),
        ):
            with pytest.raises(error):
                await channel.add(name, prompt, GREEDY)
        await channel.add("next", PROMPT, GREEDY)
        assert (await read(channel, 2)).keys() == {"long", "next"}


async def test_an_engine_that_stops_says_why():
    executor = FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE, fail_at_step=3)
    async with connected(executor) as (channel, _, _):
        await channel.add("s", PROMPT, GREEDY)
        with pytest.raises(EngineStopped, match="fake failure at step 3"):
            await read(channel, 1)
        with pytest.raises(EngineStopped, match="fake failure at step 3"):
            await channel.next_outputs()
        with pytest.raises(EngineStopped, match="fake failure at step 3"):
            await channel.add("t", PROMPT, GREEDY)


async def test_the_socket_is_for_one_and_gone_once_it_is_open():
    async with connected() as (channel, _, end):
        folder = Path(end.path).parent
        assert folder.stat().st_mode & 0o077 == 0
        await channel.add("s", PROMPT, GREEDY)
        assert not folder.exists()
        other = Channel(end.path, lambda: "the rank died")
        with pytest.raises(EngineStopped, match="the rank died"):
            await other.next_outputs()


async def test_an_end_that_goes_without_a_word_is_told(tmp_path):
    connections: list[asyncio.StreamWriter] = []

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    path = str(tmp_path / "socket")
    server = await asyncio.start_unix_server(accept, path)
    channel = Channel(path, lambda: "rank 1 of 2 died")
    waiting = [
        asyncio.create_task(channel.next_outputs()),
        asyncio.create_task(channel.add("s", PROMPT, GREEDY)),
    ]
    while not connections:  # noqa: ASYNC110 - the server's side
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.01)
    connections[0].close()
    for each in waiting:
        with pytest.raises(EngineStopped, match="rank 1 of 2 died"):
            await each
    channel.close()
    server.close()
