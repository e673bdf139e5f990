"""Where every request is charged: admission before it runs, audit and settlement after it ended,
whichever way it ended, and adoption of what a dead router left behind."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping

from router.account import RequestAccount
from router.audit import AuditRecord, AuditSink, now, record_of
from router.backends.base import Backend, OrphanedGeneration
from router.errors import LimiterUnavailable, PermissionDenied, RouterError
from router.generation import GenerationRequest
from router.limits.headers import rate_limited
from router.limits.limiter import TeamLimiter
from router.limits.policy import est_output_tokens
from router.teams import Team

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 5.0


class Accounting:
    """One per router replica. `limiter` None: nothing is limited, everything is audited."""

    def __init__(
        self,
        teams: Mapping[str, Team],
        backend: Backend,
        sink: AuditSink,
        limiter: TeamLimiter | None,
    ) -> None:
        self._teams = teams
        self._backend = backend
        self._sink = sink
        self._limiter = limiter
        self._open: dict[str, RequestAccount] = {}

    def team_of(self, account: RequestAccount) -> Team:
        assert account.principal is not None, "admission comes after authentication"
        return self._teams[account.principal.team]

    async def admit(self, account: RequestAccount, requests: list[GenerationRequest]) -> None:
        """Reserve what `requests` may cost the local engine; nothing when the request has been
        admitted."""
        team = self.team_of(account)
        if not team.may_reach("local"):
            raise PermissionDenied(f"team {team.name} may not reach the local backend")
        await self.reserve(
            account,
            requests[0].model,
            sum(len(request.prompt_token_ids) for request in requests),
            sum(est_output_tokens(request.sampling.max_tokens) for request in requests),
        )

    async def reserve(
        self, account: RequestAccount, model: str, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Once for each request, whichever backends it goes to. Raises PermissionDenied,
        RateLimited and LimiterUnavailable; then nothing is reserved."""
        if account.is_admitted:
            return
        team = self.team_of(account)
        if not team.may_use(model):
            raise PermissionDenied(f"team {team.name} may not use model {model}")
        account.is_admitted = True
        if self._limiter is None:
            return
        admission = await self._limiter.admit(
            account.request_id, team, prompt_tokens, output_tokens
        )
        account.admission = admission
        if not admission.is_allowed:
            raise rate_limited(team.name, admission)
        self._open[account.request_id] = account

    async def close(self, account: RequestAccount, status: int | None) -> None:
        """Audit first, then settle, then let the backend forget: a crash between two of them
        repeats a step, and each is idempotent. Never raises."""
        if account.end_generations is not None:  # a request cancelled twice may not have waited
            await account.end_generations()
        self._open.pop(account.request_id, None)
        self._write(record_of(account, status))
        if account.admission is not None and account.admission.is_allowed:
            await self._settle(account.request_id, self.team_of(account), account.num_tokens)
        await self._acknowledge(
            [each for each, outcome in account.generations.items() if outcome.backend == "local"]
        )

    async def sweep(self) -> None:
        """Keep the leases of long requests alive and adopt orphans, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.renew_leases()
                await self.adopt_orphans()
            except RouterError as exc:
                logger.warning("sweep failed error=%s", exc)

    async def renew_leases(self) -> None:
        if self._limiter is None:
            return
        by_team: dict[str, list[str]] = defaultdict(list)
        for account in self._open.values():
            by_team[self.team_of(account).name].append(account.request_id)
        for name, request_ids in by_team.items():
            await self._limiter.renew(self._teams[name], request_ids)

    async def adopt_orphans(self) -> None:
        """Generations that ended and that no router has accounted for: theirs died."""
        for orphan in await self._backend.claim_orphans():
            logger.warning("adopting orphan request_id=%s", orphan.request_id)
            self._write(_orphan_record(orphan))
            usage, team = orphan.usage, self._teams.get(orphan.tenant)
            if team is not None:
                num_tokens = usage.prompt_tokens + usage.completion_tokens
                await self._settle(orphan.request_id, team, num_tokens)
            await self._acknowledge([orphan.request_id])

    async def _settle(self, request_id: str, team: Team, num_tokens: int) -> None:
        if self._limiter is None:
            return
        try:
            if not await self._limiter.settle(request_id, team, num_tokens):
                logger.warning("nothing left to settle request_id=%s", request_id)
        except LimiterUnavailable as exc:
            logger.warning("not settled request_id=%s error=%s", request_id, exc)

    async def _acknowledge(self, generation_ids: list[str]) -> None:
        if not generation_ids:
            return
        try:
            await self._backend.acknowledge(generation_ids)
        except RouterError as exc:  # they come back as orphans, and are recognised
            logger.warning("not acknowledged request_ids=%s error=%s", generation_ids, exc)

    def _write(self, record: AuditRecord) -> None:
        try:
            self._sink.write(record)
        except OSError:
            logger.exception("audit record lost request_id=%s", record.request_id)


def _orphan_record(orphan: OrphanedGeneration) -> AuditRecord:
    return AuditRecord(
        time=now(),
        request_id=orphan.request_id,
        team=orphan.tenant,
        key_id=orphan.key_id,
        dialect="",
        route="",
        model=orphan.model,
        backend="local",
        status=None,
        prompt_tokens=orphan.usage.prompt_tokens,
        cached_tokens=orphan.usage.cached_tokens,
        completion_tokens=orphan.usage.completion_tokens,
        num_completions=1,
        is_orphan=True,
        finish_reasons=(orphan.finish_reason.value,),
    )
