"""A team's limits as the status page shows them: what there is and what is left, by name."""

from collections.abc import Mapping
from typing import Any

from router.identity import Principal
from router.limits.limiter import Limiter
from router.limits.policy import NO_LIMITS
from router.teams import Team


class TeamStatus:
    def __init__(self, teams: Mapping[str, Team], limiter: Limiter) -> None:
        self._teams = teams
        self._limiter = limiter

    async def __call__(self, principal: Principal) -> dict[str, Any] | None:
        """None for a team without limits. Raises LimiterUnavailable."""
        team = self._teams.get(principal.team)
        if team is None or team.limits == NO_LIMITS:
            return None
        left = await self._limiter.peek(team)
        return {
            name: {"limit": allowance.limit, "remaining": allowance.remaining}
            for name, allowance in (
                ("requests_per_minute", left.requests),
                ("tokens_per_minute", left.tokens),
            )
            if allowance is not None
        }
