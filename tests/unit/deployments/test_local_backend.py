"""Which replicas the router's backend asks, against handles that only write down what is asked."""

import asyncio
import pickle
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import RayServeException

from deployments.errors import ReplicaRefusal
from deployments.local_backend import LocalBackend, sum_of
from router.backends.base import BackendStatus, OrphanedGeneration
from router.errors import BackendUnavailable, InvalidRequest, NotFound
from router.generation import (
    FinishReason,
    GenerationRequest,
    SamplingSettings,
    TokenEvent,
    Usage,
)


class FakeEngines:
    """A deployment handle. `to_one` and `to_all` answer by method; an exception is raised, and one
    in a list of `to_all` is what that replica raised. `streams` has what each `follow` yields; it
    does not end where that ends in `...`, or where there is none left."""

    def __init__(self, to_one: dict[str, Any], to_all: dict[str, list[Any]]) -> None:
        self._to_one = to_one
        self._to_all = to_all
        self.calls: list[tuple[Any, ...]] = []
        self.streams: list[list[Any]] = []
        self.readers: list[tuple[str, str]] = []  # replica and reader, of each `follow`

    def options(self, *, stream: bool) -> "FakeEngines":
        assert stream
        return self

    def follow_as(self, reader: str, replica: str) -> "FakeStream":
        self.readers.append((replica, reader))
        return FakeStream(self.streams.pop(0) if self.streams else [...])

    def __getattr__(self, method: str) -> Any:
        return FakeMethod(self, method)

    def broadcast(self, method: str, *arguments: Any) -> Any:
        self.calls.append(("all", method, *arguments))
        return FakeBroadcast(self._to_all[method])

    async def answer(self, method: str, arguments: tuple[Any, ...], replica: str | None) -> Any:
        self.calls.append((replica, method, *arguments))
        answers = self._to_one[method]
        answer = answers.pop(0) if isinstance(answers, list) else answers
        if isinstance(answer, BaseException):
            raise answer
        return answer


class FakeMethod:
    def __init__(self, engines: FakeEngines, method: str) -> None:
        self._engines = engines
        self._method = method

    def remote(
        self,
        *arguments: Any,
        replica: str | None = None,
        avoid: tuple[str, ...] = (),
        reader: str = "",
    ) -> Any:
        if self._method == "follow":
            return self._engines.follow_as(*arguments, replica)
        assert bool(reader) == (self._method == "submit")
        arguments += (avoid,) if avoid else ()
        return self._engines.answer(self._method, arguments, replica)


class FakeStream:
    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    async def __aiter__(self):
        for answer in self._answers:
            if answer is ...:
                await asyncio.Event().wait()
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    def cancel(self) -> None:
        pass


class FakeBroadcast:
    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    async def results_async(self, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return self._answers


def backend_on(
    to_one: dict[str, Any], to_all: dict[str, list[Any]] | None = None
) -> tuple[LocalBackend, FakeEngines]:
    engines = FakeEngines(to_one, to_all or {})
    return LocalBackend(engines, 10.0), engines


def request(name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, "tiny", (1, 2), SamplingSettings(max_tokens=4))


def raised_there(error: Exception) -> RayTaskError:
    return RayTaskError("submit", "traceback", error).as_instanceof_cause()


async def test_what_follows_a_submit_goes_to_its_replica():
    usage = Usage(2, 0, 1)
    backend, engines = backend_on({"submit": ["a", "b"], "abort": usage, "acknowledge": None})
    await backend.submit(request("r"))
    await backend.submit(request("s"))
    assert await backend.abort("s") == usage
    await backend.acknowledge(["r", "s"])
    assert engines.calls[2:] == [
        ("b", "abort", "s"),
        ("a", "acknowledge", ["r"]),
        ("b", "acknowledge", ["s"]),
    ]


async def test_of_unknown_generations_all_replicas_are_asked():
    usage = Usage(2, 0, 1)
    backend, engines = backend_on({}, {"abort": [None, usage, None], "acknowledge": [None] * 3})
    assert await backend.abort("r") == usage
    await backend.acknowledge(["r"])
    assert [call[0] for call in engines.calls] == ["all", "all"]


async def test_another_routers_generation_is_located_once():
    backend, engines = backend_on({"abort": None}, {"locate": [None, "b", None]})
    assert await backend._locate("r") == "b"
    assert await backend._locate("r") == "b"
    await backend.abort("r")
    assert engines.calls == [("all", "locate", "r"), ("b", "abort", "r")]


async def test_a_generation_that_nobody_holds_is_not_found():
    backend, _ = backend_on({}, {"locate": [None, None]})
    with pytest.raises(NotFound, match="generation r is unknown"):
        async for _ in backend.subscribe("r"):
            pass


def refusal_of(replica: str) -> RayTaskError:
    """As it comes from another process."""
    refusal = ReplicaRefusal(BackendUnavailable("restarting", retry_after_s=1), replica)
    return raised_there(pickle.loads(pickle.dumps(refusal)))


async def test_refusing_replicas_are_passed_over():
    answers = [refusal_of("a"), refusal_of("c"), "b"]
    backend, engines = backend_on({"submit": answers, "acknowledge": None})
    await backend.submit(request())
    await backend.acknowledge(["r"])
    assert engines.calls[1:] == [
        (None, "submit", request(), ("a",)),
        (None, "submit", request(), ("a", "c")),
        ("b", "acknowledge", ["r"]),
    ]


@pytest.mark.parametrize("refusing", ["aa", "abcd"])
async def test_a_request_that_all_refuse_is_refused(refusing):
    backend, engines = backend_on({"submit": [refusal_of(tag) for tag in refusing]})
    with pytest.raises(BackendUnavailable, match="restarting") as caught:
        await backend.submit(request())
    assert caught.value.retry_after_s == 1
    assert len(engines.calls) == len(refusing)


async def test_what_may_have_arrived_or_is_wrong_everywhere_is_not_sent_twice():
    for error, expected in (
        (ActorDiedError(), BackendUnavailable),
        (raised_there(InvalidRequest("too long")), InvalidRequest),
    ):
        backend, engines = backend_on({"submit": [error]})
        with pytest.raises(expected):
            await backend.submit(request())
        assert len(engines.calls) == 1


async def test_one_dead_replica_does_not_silence_the_others():
    orphan = OrphanedGeneration("r", "m", "red", "k", Usage(1, 0, 1), FinishReason.ABORT)
    status = BackendStatus(ready=True, reason="", num_running=2, num_blocks=10)
    backend, _ = backend_on(
        {},
        {
            "claim_orphans": [[orphan], ActorDiedError(), []],
            "status": [status, ActorDiedError(), status],
        },
    )
    assert await backend.claim_orphans() == [orphan]
    summed = await backend.status()
    assert summed.ready
    assert (summed.num_running, summed.num_blocks) == (4, 20)


async def test_no_replica_at_all_is_typed_and_not_ready():
    backend, _ = backend_on({}, {"claim_orphans": [ActorDiedError()], "status": [ActorDiedError()]})
    with pytest.raises(BackendUnavailable):
        await backend.claim_orphans()
    assert (await backend.status()).reason == "the engine died and is being restarted"


async def test_an_abort_outlives_the_request_that_asked_for_it():
    started, arrived = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        started.set()
        await asyncio.sleep(0.01)
        arrived.set()

    backend, engines = backend_on({"submit": "a"})
    await backend.submit(request())
    engines.answer = lambda *_: slowly()
    abort = asyncio.create_task(backend.abort("r"))
    await started.wait()
    abort.cancel()
    await asyncio.wait_for(arrived.wait(), 1)
    assert abort.cancelled()


def event(name: str, index: int, *token_ids: int, reason: FinishReason | None = None) -> TokenEvent:
    usage = Usage(2, 0, index + len(token_ids))
    return TokenEvent(name, index, token_ids, usage, finish_reason=reason)


async def read(backend: LocalBackend, name: str) -> list[TokenEvent]:
    return [each async for events in backend.subscribe(name) for each in events]


async def test_generations_of_one_engine_come_in_one_stream():
    backend, engines = backend_on({"submit": "a"})
    engines.streams = [
        [
            [event("r", 0, 7), event("unknown", 0, 1)],
            [event("s", 0, 5), event("r", 1, 8, 9, reason=FinishReason.LENGTH)],
            [event("s", 1, 6, reason=FinishReason.LENGTH)],
        ]
    ]
    await backend.submit(request("r"))
    await backend.submit(request("s"))
    ours, others = await asyncio.gather(read(backend, "r"), read(backend, "s"))
    assert [token for each in ours for token in each.token_ids] == [7, 8, 9]
    assert [token for each in others for token in each.token_ids] == [5, 6]
    assert len(engines.readers) == 1
    assert [call[1] for call in engines.calls] == ["submit", "submit"]


async def test_tokens_that_wait_for_their_reader_come_at_once():
    backend, engines = backend_on({"submit": "a"})
    last = event("r", 2, 9, reason=FinishReason.LENGTH)
    engines.streams = [[[event("r", 0, 7)], [event("r", 1, 8)], [last]]]
    await backend.submit(request())
    await asyncio.sleep(0)
    (all_of_it,) = await read(backend, "r")
    assert (all_of_it.index, all_of_it.token_ids) == (0, (7, 8, 9))
    assert (all_of_it.usage, all_of_it.finish_reason) == (last.usage, FinishReason.LENGTH)


async def test_a_stream_that_breaks_fails_what_it_has_not_ended_and_the_next_is_another():
    backend, engines = backend_on({"submit": "a"})
    ended = event("s", 0, 5, reason=FinishReason.LENGTH)
    engines.streams = [[[event("r", 0, 7), ended], ActorDiedError()]]
    await backend.submit(request("r"))
    await backend.submit(request("s"))
    stream = backend.subscribe("r")
    assert [each.token_ids for each in await anext(stream)] == [(7,)]
    with pytest.raises(BackendUnavailable, match="died and is being restarted"):
        await anext(stream)
    assert await read(backend, "s") == [ended]
    engines.streams = [[[event("t", 0, 3, reason=FinishReason.LENGTH)]]]
    await backend.submit(request("t"))
    assert len(await read(backend, "t")) == 1
    (_, before), (_, after) = engines.readers
    assert before != after


async def test_a_stream_that_was_idle_is_opened_again_for_what_came_meanwhile():
    backend, engines = backend_on({"submit": "a"})
    engines.streams = [[[event("r", 0, 7, reason=FinishReason.LENGTH)]]]
    await backend.submit(request("r"))
    assert len(await read(backend, "r")) == 1
    engines.streams = [[[event("s", 0, 7, reason=FinishReason.LENGTH)]]]
    await backend.submit(request("s"))
    assert len(await read(backend, "s")) == 1
    assert len(set(engines.readers)) == 1


async def test_what_an_engine_forgot_is_not_waited_for():
    backend, engines = backend_on({"submit": "a"})
    engines.streams = [[[event("r", 0, 7)]]]
    await backend.submit(request("r"))
    with pytest.raises(NotFound, match="generation r is unknown"):
        await read(backend, "r")


async def test_a_reader_that_goes_leaves_its_generation():
    backend, engines = backend_on({"submit": "a", "leave": None})
    engines.streams = [[[event("r", 0, 7)], ...]]
    await backend.submit(request("r"))
    stream = backend.subscribe("r")
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0.01)
    ((_, reader),) = set(engines.readers)
    assert engines.calls[-1] == ("a", "leave", reader, "r")


async def test_a_refused_request_leaves_nothing_behind():
    backend, engines = backend_on({"submit": [raised_there(InvalidRequest("too long"))]})
    with pytest.raises(InvalidRequest):
        await backend.submit(request())
    assert engines.readers == []
    assert not backend._inbox._journals


def test_a_sum_is_ready_when_one_is_and_says_why_when_none_is():
    one = BackendStatus(True, "", num_waiting=1, cached_tokens_total=5)
    stalled = BackendStatus(False, "stalled", num_waiting=2, cached_tokens_total=7)
    both = sum_of([one, stalled])
    assert (both.ready, both.reason, both.num_waiting, both.cached_tokens_total) == (
        True,
        "",
        3,
        12,
    )
    assert sum_of([stalled, stalled]).reason == "stalled"


def test_serve_names_its_errors_as_expected():
    from ray.serve.exceptions import DeploymentUnavailableError

    assert issubclass(DeploymentUnavailableError, RayServeException)
