"""The text-free, Ray-free part of an engine replica: journals, leases, and the pump that reads the
ranks. The step loop runs elsewhere (a rank actor); nothing here ever blocks on it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Protocol

from deployments.feed import Feed
from deployments.journal import Journal
from deployments.wire import to_router_error, to_sampling_params, to_token_event, to_usage
from engine.cache.tiers import ColdTierCounters
from engine.errors import EngineError, EngineStopped
from engine.outputs import SkipCounts, StepOutput
from engine.outputs import Usage as EngineUsage
from engine.sampling_params import SamplingParams
from router.affinity import load_tokens
from router.backends.base import BackendStatus, OrphanedGeneration, SkippedTotals
from router.errors import BackendUnavailable, InvalidRequest, NotFound
from router.generation import FinishReason, GenerationRequest, TokenEvent, Usage

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25
MAX_UNCLAIMED_S = 3600.0  # no router for an hour: the journal is dropped, with a warning
CLAIM_S = 30.0  # an orphan that was claimed and not acknowledged is offered again after this


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank holds since it was loaded."""

    pid: int
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Rank 0's numbers, which count for all. `stalled_s`: time without a finished step while work
    is in flight."""

    stalled_s: float
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    prompt_tokens_total: int
    cached_tokens_total: int
    completion_tokens_total: int
    preemptions_total: int
    skipped: SkipCounts = field(default_factory=SkipCounts)
    cold_tier: ColdTierCounters = field(default_factory=ColdTierCounters)
    ranks: tuple[RankLoad, ...] = ()


class RankClient(Protocol):
    """All ranks as the shell sees them. Raises EngineError: EngineStopped when one is gone."""

    async def add(
        self,
        seq_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        cache_salt: bytes,
        priority: int,
    ) -> None: ...

    async def abort(self, seq_id: str) -> EngineUsage | None: ...

    async def next_outputs(self) -> list[StepOutput]: ...

    async def status(self) -> RankStatus: ...


@dataclass(frozen=True, slots=True)
class ShellOptions:
    lease_s: float = 10.0
    retention_s: float = 60.0
    step_timeout_s: float = 60.0


class EngineShell:
    """`start` begins pumping; `stop` ends it. All methods run on one event loop."""

    def __init__(
        self,
        rank: RankClient,
        options: ShellOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._options = options
        self._clock = clock
        self._journals: dict[str, Journal] = {}
        self._feeds: dict[str, Feed] = {}  # by reader
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped: str | None = None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._sweep())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, request: GenerationRequest, reader: str | None = None) -> None:
        """Start a generation under a lease; `reader` finds it in its `follow`. Raises
        InvalidRequest, BackendUnavailable."""
        if self._stopped is not None:
            raise BackendUnavailable(f"the engine is restarting: {self._stopped}", retry_after_s=10)
        if request.request_id in self._journals:
            raise InvalidRequest(f"request id {request.request_id} is already in use")
        params = to_sampling_params(request.sampling)
        journal = Journal(request, self._clock() + self._options.lease_s)
        self._journals[request.request_id] = journal
        try:
            await self._rank.add(
                request.request_id,
                request.prompt_token_ids,
                params,
                request.cache_salt.encode(),
                request.priority,
            )
        except EngineError as exc:
            del self._journals[request.request_id]
            raise to_router_error(exc) from exc
        if reader is not None:
            self._feeds.setdefault(reader, Feed()).add(journal)

    async def follow(self, reader: str) -> AsyncGenerator[list[TokenEvent], None]:
        """All generations submitted for `reader`, whether before or after, each from its start: an
        event of each that has something new. Ends when there is none for a while. For each of them
        it is a reader as `subscribe` is one."""
        feed = self._feeds.setdefault(reader, Feed())
        feed.open()
        try:
            async for events in feed.read():
                yield events
        finally:
            if self._feeds.get(reader) is feed:
                del self._feeds[reader]
            for journal in feed.journals:
                await self._leave(feed, journal.request.request_id)

    async def leave(self, reader: str, request_id: str) -> None:
        """`reader` follows this generation no more. Idempotent."""
        if reader in self._feeds:
            await self._leave(self._feeds[reader], request_id)

    async def subscribe(
        self, request_id: str, after_index: int = 0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Read from position `after_index`. The last reader to leave starts the grace period."""
        journal = self._journal(request_id)
        journal.num_readers += 1
        journal.deadline_s = self._clock() + self._options.lease_s
        try:
            async for events in journal.read(after_index):
                yield events
        finally:
            journal.num_readers -= 1
            await self._lost_reader(journal)

    async def renew(self, request_ids: Iterable[str]) -> None:
        """The readers of these generations are still there."""
        deadline_s = self._clock() + self._options.lease_s
        for request_id in request_ids:
            journal = self._journals.get(request_id)
            if journal is not None and journal.num_readers > 0:
                journal.deadline_s = max(journal.deadline_s, deadline_s)

    async def abort(self, request_id: str) -> Usage | None:
        """End a generation; its final usage, also when it had already ended. Idempotent."""
        journal = self._journals.get(request_id)
        if journal is None:
            return None
        if not journal.has_ended:
            usage = await self._abort_sequence(request_id)
            if usage is None:  # it finished by itself, and its last output is on the way
                await journal.ended()
            elif not journal.has_ended:
                self._end(journal, usage)
        return journal.usage

    async def acknowledge(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            journal = self._journals.get(request_id)
            if journal is not None:
                journal.is_acknowledged = True

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        """Generations that ended a lease ago or more and were never acknowledged."""
        now_s = self._clock()
        orphans = [
            journal
            for journal in self._journals.values()
            if not journal.is_acknowledged
            and journal.ended_s is not None
            and journal.ended_s + self._options.lease_s <= now_s
            and journal.claimed_until_s <= now_s
        ]
        for journal in orphans:
            journal.claimed_until_s = now_s + CLAIM_S
        return [_orphan(journal) for journal in orphans]

    async def status(self) -> BackendStatus:
        if self._stopped is not None:
            return BackendStatus(ready=False, reason=self._stopped)
        try:
            rank = await self._rank.status()
        except EngineError as exc:
            return BackendStatus(ready=False, reason=str(exc))
        reason = self._stall(rank)
        return BackendStatus(
            ready=reason == "",
            reason=reason,
            num_running=rank.num_running,
            num_waiting=rank.num_waiting,
            num_free_blocks=rank.num_free_blocks,
            num_blocks=rank.num_blocks,
            prompt_tokens_total=rank.prompt_tokens_total,
            cached_tokens_total=rank.cached_tokens_total,
            completion_tokens_total=rank.completion_tokens_total,
            preemptions_total=rank.preemptions_total,
            cold_spilled_blocks_total=rank.cold_tier.spilled,
            cold_dropped_blocks_total=rank.cold_tier.dropped,
            cold_restored_blocks_total=rank.cold_tier.restored,
            cold_missed_blocks_total=rank.cold_tier.missed,
            cold_corrupt_blocks_total=rank.cold_tier.corrupt,
            skipped=SkippedTotals(*astuple(rank.skipped)),
            num_unaccounted=sum(not j.is_acknowledged for j in self._journals.values()),
        )

    def holds(self, request_id: str) -> bool:
        return request_id in self._journals

    @property
    def num_journals(self) -> int:
        return len(self._journals)

    @property
    def tokens_in_flight(self) -> int:
        """The load of all generations that have not ended."""
        journals = self._journals.values()
        return sum(load_tokens(journal.request) for journal in journals if not journal.has_ended)

    def _journal(self, request_id: str) -> Journal:
        journal = self._journals.get(request_id)
        if journal is None:
            raise NotFound(f"generation {request_id} is unknown here or has expired")
        return journal

    async def _leave(self, feed: Feed, request_id: str) -> None:
        journal = feed.leave(request_id)
        if journal is not None:
            await self._lost_reader(journal)

    async def _lost_reader(self, journal: Journal) -> None:
        """The last one to leave starts the grace period."""
        if journal.num_readers == 0 and not journal.has_ended:
            journal.deadline_s = self._clock() + journal.request.grace_s
            await self._abort_expired([journal])

    def _stall(self, rank: RankStatus) -> str:
        if rank.stalled_s <= self._options.step_timeout_s:
            return ""
        return f"no step finished for {rank.stalled_s:.0f} s with work in flight"

    async def _pump(self) -> None:
        """Move what the ranks produced into the journals until the engine stops."""
        try:
            while True:
                for step in await self._rank.next_outputs():
                    self._record(step)
        except EngineError as exc:
            logger.error("engine stopped reason=%s", exc)
            self._fail_all(exc)
        except Exception as exc:  # no reader may wait for a pump that has ended
            logger.exception("pump broke")
            self._fail_all(EngineStopped(f"its outputs cannot be read: {exc!r}"))

    def _record(self, step: StepOutput) -> None:
        for output in step.outputs:
            journal = self._journals.get(output.seq_id)
            if journal is None or journal.has_ended:
                continue
            journal.append(to_token_event(output, journal.num_tokens))
            if journal.has_ended:
                self._retain(journal)

    def _retain(self, journal: Journal) -> None:
        journal.ended_s = self._clock()
        journal.deadline_s = journal.ended_s + self._options.retention_s

    def _fail_all(self, cause: EngineError) -> None:
        self._stopped = str(cause)
        for journal in self._journals.values():
            if not journal.has_ended:
                journal.fail(to_router_error(EngineStopped(str(cause))))
                self._retain(journal)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self._abort_expired(list(self._journals.values()))
                self._forget_unread_feeds()
            except Exception:  # leases must go on running out
                logger.exception("sweep failed")

    async def _abort_expired(self, journals: Iterable[Journal]) -> None:
        """Abort generations whose lease ran out; forget ended ones past their retention, if they
        are accounted for or that has become hopeless."""
        now_s = self._clock()
        for journal in journals:
            if now_s < journal.deadline_s:
                continue
            request_id = journal.request.request_id
            if not journal.has_ended:
                await asyncio.shield(self.abort(request_id))
            elif journal.is_acknowledged:
                self._journals.pop(request_id, None)
            elif now_s > journal.deadline_s + MAX_UNCLAIMED_S:
                logger.warning("dropped, never accounted for request_id=%s", request_id)
                self._journals.pop(request_id, None)

    def _forget_unread_feeds(self) -> None:
        """Their readers died before they read anything."""
        for reader, feed in list(self._feeds.items()):
            if not feed.is_open and not any(
                self.holds(j.request.request_id) for j in feed.journals
            ):
                del self._feeds[reader]

    async def _abort_sequence(self, request_id: str) -> EngineUsage | None:
        try:
            return await self._rank.abort(request_id)
        except EngineError as exc:
            self._fail_all(exc)  # a rank that is gone holds nothing any more
            return None

    def _end(self, journal: Journal, usage: EngineUsage) -> None:
        event = TokenEvent(
            request_id=journal.request.request_id,
            index=journal.num_tokens,
            token_ids=(),
            usage=to_usage(usage),
            finish_reason=FinishReason.ABORT,
        )
        journal.append(event)
        self._retain(journal)


def _orphan(journal: Journal) -> OrphanedGeneration:
    request = journal.request
    return OrphanedGeneration(
        request_id=request.request_id,
        model=request.model,
        tenant=request.tenant,
        key_id=request.key_id,
        usage=journal.usage,
        finish_reason=journal.finish_reason or FinishReason.ABORT,
    )
