"""The local engines as one router backend: Serve handle calls in, the router's errors out."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextvars import Context
from dataclasses import fields
from functools import reduce
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from deployments.errors import ReplicaRefusal
from deployments.inbox import Inbox, Stream
from deployments.journal import Journal
from router.backends.base import BackendStatus, OrphanedGeneration, SkippedTotals
from router.errors import BackendError, BackendUnavailable, NotFound, RouterError
from router.generation import GenerationRequest, TokenEvent, Usage

STATUS_TIMEOUT_S = 2.0
SUBMIT_TIMEOUT_S = 30.0  # Serve holds a call back while no replica is up
MAX_REFUSALS = 3  # replicas that are asked in vain
MAX_PLACEMENTS = 100_000  # remembered; of older ones the replicas are asked


class LocalBackend:
    """Serve chooses the replica for `submit`; what follows goes to the same one. Renews the leases
    of all generations it reads, one call to every replica for all of them."""

    def __init__(self, engine: Any, lease_s: float) -> None:
        self._engine = engine
        self._lease_s = lease_s
        self._placements: dict[str, str] = {}  # tag of the replica, by request id
        self._inbox = Inbox(self._follow)
        self._reading: set[str] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def submit(self, request: GenerationRequest) -> None:
        reader = self._inbox.expect(request)
        try:
            async with asyncio.timeout(SUBMIT_TIMEOUT_S):
                replica: str = await self._submit(request, reader)
        except BaseException as exc:
            self._inbox.forget(request.request_id)
            if isinstance(exc, TimeoutError):
                raise BackendUnavailable(
                    f"no engine took the request within {SUBMIT_TIMEOUT_S:.0f} s", retry_after_s=10
                ) from exc
            raise
        self._remember(request.request_id, replica)
        self._inbox.follow(request.request_id, Stream(reader, replica))

    async def subscribe(
        self, request_id: str, after_index: int = 0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        self._keep_renewing()
        self._reading.add(request_id)
        journal = self._inbox.take(request_id) if after_index == 0 else None
        reading = (
            self._subscribe(request_id, after_index) if journal is None else self._read(journal)
        )
        try:
            async with contextlib.aclosing(reading) as stream:
                async for events in stream:
                    yield events
        finally:
            self._reading.discard(request_id)

    async def abort(self, request_id: str) -> Usage | None:
        usage: Usage | None = await _outlive(self._abort(request_id))
        self._inbox.forget(request_id)
        return usage

    async def acknowledge(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._inbox.forget(request_id)
        await _outlive(self._acknowledge(request_ids))

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        claims: list[list[OrphanedGeneration]] = await self._ask_all("claim_orphans")
        return [orphan for claim in claims for orphan in claim]

    async def status(self) -> BackendStatus:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return sum_of(await self._ask_all("status"))
        except RouterError as exc:
            return BackendStatus(ready=False, reason=exc.message)
        except TimeoutError:
            return BackendStatus(
                ready=False, reason=f"the engine did not answer within {STATUS_TIMEOUT_S:.0f} s"
            )

    async def _read(self, journal: Journal) -> AsyncGenerator[list[TokenEvent], None]:
        """What the engines sent of a generation that this router submitted."""
        request_id = journal.request.request_id
        try:
            async with contextlib.aclosing(journal.read(0)) as stream:
                async for events in stream:
                    yield events
        finally:
            followed = self._inbox.forget(request_id)
            if followed is not None and not journal.has_ended:
                self._leave(followed, request_id)

    async def _subscribe(
        self, request_id: str, after_index: int
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """A stream of its own: of a generation that another router submitted, or that was read
        before."""
        replica = await self._locate(request_id)
        stream = self._engine.options(stream=True).subscribe.remote(
            request_id, after_index, replica=replica
        )
        try:
            async for events in stream:
                yield events
        except (RayError, RayServeException) as exc:
            raise as_router_error(exc) from exc
        finally:
            stream.cancel()

    async def _follow(self, stream: Stream) -> AsyncGenerator[list[TokenEvent], None]:
        followed = self._engine.options(stream=True).follow.remote(
            stream.reader, replica=stream.replica
        )
        try:
            async for events in followed:
                yield events
        except (RayError, RayServeException) as exc:
            raise as_router_error(exc) from exc
        finally:
            followed.cancel()

    def _leave(self, followed: Stream, request_id: str) -> None:
        """Without a wait: its reader has gone."""
        left = self._call("leave", followed.reader, request_id, replica=followed.replica)
        task = asyncio.create_task(_suppressing(left), context=Context())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _submit(self, request: GenerationRequest, reader: str) -> Any:
        """A replica whose ranks died refuses, and looks idle, until Serve replaces it: others are
        asked. Without a refusal the request may have arrived, and must not run twice."""
        refused: tuple[str, ...] = ()
        while True:
            try:
                return await self._call("submit", request, avoid=refused, reader=reader)
            except ReplicaRefusal as exc:
                if exc.replica in refused or len(refused) == MAX_REFUSALS:
                    raise exc.reason from exc
                refused = (*refused, exc.replica)

    async def _locate(self, request_id: str) -> str:
        """Another router may have submitted it: then the replicas are asked. Raises NotFound."""
        if request_id not in self._placements:
            tags = [tag for tag in await self._ask_all("locate", request_id) if tag is not None]
            if not tags:
                raise NotFound(f"generation {request_id} is unknown here or has expired")
            self._remember(request_id, tags[0])
        return self._placements[request_id]

    async def _abort(self, request_id: str) -> Usage | None:
        """Of a cancelled submit nobody knows where it went: all are asked."""
        replica = self._placements.get(request_id)
        if replica is not None:
            usage: Usage | None = await self._call("abort", request_id, replica=replica)
            return usage
        usages: list[Usage | None] = await self._ask_all("abort", request_id)
        return next((usage for usage in usages if usage is not None), None)

    async def _acknowledge(self, request_ids: Sequence[str]) -> None:
        by_replica: defaultdict[str | None, list[str]] = defaultdict(list)
        for request_id in request_ids:
            by_replica[self._placements.pop(request_id, None)].append(request_id)
        for replica, placed in by_replica.items():
            if replica is None:
                await self._ask_all("acknowledge", placed)
            else:
                await self._call("acknowledge", placed, replica=replica)

    def _remember(self, request_id: str, replica: str) -> None:
        self._placements[request_id] = replica
        if len(self._placements) > MAX_PLACEMENTS:
            del self._placements[next(iter(self._placements))]

    async def _call(self, method: str, *arguments: Any, **addressed: Any) -> Any:
        try:
            return await getattr(self._engine, method).remote(*arguments, **addressed)
        except (RayError, RayServeException) as exc:
            if isinstance(exc, RayTaskError) and isinstance(exc.cause, ReplicaRefusal):
                raise exc.cause from exc
            raise as_router_error(exc) from exc

    async def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all replicas that give one. Raises RouterError when none does: what runs
        on a replica that died has died with it, and must not keep the others from answering."""
        try:
            call = self._engine.broadcast(method, *arguments)
            answers = await call.results_async(return_exceptions=True)
        except (RayError, RayServeException) as exc:
            raise as_router_error(exc) from exc
        given = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not given:
            raise as_router_error(answers[0]) from answers[0]
        return given

    def _keep_renewing(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), context=Context())

    async def _renew(self) -> None:
        """Lives as long as there is something to read."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if not self._reading:
                return
            with contextlib.suppress(RouterError):
                await self._ask_all("renew", list(self._reading))


async def _outlive(call: Coroutine[Any, Any, Any]) -> Any:
    """A call that outlives the request it is made for: Serve cancels the calls of a cancelled
    request, and knows them by their context."""
    return await asyncio.shield(asyncio.create_task(call, context=Context()))


async def _suppressing(call: Coroutine[Any, Any, Any]) -> None:
    """A generation on an engine that cannot be reached is over."""
    with contextlib.suppress(RouterError):
        await call


def sum_of(statuses: Sequence[BackendStatus]) -> BackendStatus:
    """Of all replicas: ready when one is, and every number a sum, but for what is a maximum."""
    numbers = [field.name for field in fields(BackendStatus) if field.type in ("int", int)]
    is_ready = any(status.ready for status in statuses)
    reasons = dict.fromkeys(status.reason for status in statuses if not status.ready)
    return BackendStatus(
        ready=is_ready,
        reason="" if is_ready else "; ".join(reasons),
        skipped=reduce(SkippedTotals.plus, (status.skipped for status in statuses)),
        **{name: sum(getattr(status, name) for status in statuses) for name in numbers},
    )


def as_router_error(exc: Exception) -> RouterError:
    """The replica's own error when it raised one of ours; else what its caller can do."""
    if isinstance(exc, RayTaskError) and isinstance(exc.cause, RouterError):
        return exc.cause
    if isinstance(exc, RayTaskError) and not isinstance(exc.cause, RayError):
        return BackendError("the engine failed on this request")
    if isinstance(exc, RayActorError | RayTaskError | RayServeException):
        return BackendUnavailable("the engine died and is being restarted", retry_after_s=10)
    return BackendUnavailable("the engine cannot be reached", retry_after_s=10)
