"""The upstreams, what is known of their health, and the table that says who answers for whom."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter

from router.backends.health import CircuitBreaker
from router.backends.upstream import Upstream
from router.errors import BackendError, Overloaded, PermissionDenied, RateLimited, UpstreamRefusal
from router.routes import LOCAL, Route, RoutesError, RouteTable, Target, routes_from_list
from router.teams import Team

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Verdict:
    """`has_failed`: the request failed although nothing was raised."""

    has_failed: bool = False


class BackendPool:
    """One per router replica. The table is replaced whole: a request sees one table from beginning
    to end."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        routes: Any = (),
        local_models: Collection[str] | None = None,
    ) -> None:
        """Raises RoutesError."""
        self._local_models = local_models
        self.upstreams = {upstream.settings.name: upstream for upstream in upstreams}
        self.breakers = {name: CircuitBreaker() for name in self.upstreams}
        self.table: RouteTable = routes_from_list(routes, self.upstreams, local_models)
        self.rejection: str | None = None
        self.requests = Counter(
            "flashray:upstream_requests",
            "Requests sent to upstreams, by how they ended.",
            ["backend", "outcome"],
            registry=None,
        )
        self.fallbacks = Counter(
            "flashray:fallbacks",
            "Requests passed on to the next target of their route.",
            registry=None,
        )
        self.rejections = Counter(
            "flashray:routes_rejected", "Route tables refused; the old one stayed.", registry=None
        )

    def replace_routes(self, entries: Any) -> None:
        """New requests see the new table at once. Raises RoutesError, and the old one stays."""
        try:
            self.table = routes_from_list(entries, self.upstreams, self._local_models)
        except RoutesError as exc:
            self.rejection = str(exc)
            self.rejections.inc()
            raise
        self.rejection = None
        logger.info("routes replaced num_routes=%d", len(self.table.routes))

    def targets(self, route: Route, team: Team) -> tuple[Target, ...]:
        """Those of the route that the team may reach. A request leaves the company as a fallback
        only when route and team both say so. Raises PermissionDenied when none is left."""
        if not team.may_use(route.model):
            raise PermissionDenied(f"team {team.name} may not use model {route.model}")
        can_leave = route.egress and team.egress
        targets = tuple(
            target
            for position, target in enumerate(route.targets)
            if team.may_reach(target.backend)
            and (position == 0 or can_leave or not self._leaves_company(target))
        )
        if not targets:
            raise PermissionDenied(f"team {team.name} may reach no backend of model {route.model}")
        return targets

    @contextlib.contextmanager
    def judged(self, backend: str) -> Iterator[Verdict]:
        """Learn from one request. An upstream that is busy, or refuses what a caller did wrong, is
        alive."""
        breaker, outcome, verdict = self.breakers[backend], "cancelled", Verdict()
        try:
            yield verdict
            outcome = "failed" if verdict.has_failed else "success"
            breaker.failed() if verdict.has_failed else breaker.succeeded()
        except (UpstreamRefusal, RateLimited, Overloaded):
            outcome = "refused"
            breaker.succeeded()
            raise
        except BackendError:
            outcome = "failed"
            breaker.failed()
            raise
        finally:
            if outcome == "cancelled":
                breaker.gave_up()
            self.requests.labels(backend, outcome).inc()

    def status(self) -> dict[str, Any]:
        """For the status page: no address and no key; nothing where nothing is routed."""
        if not self.upstreams and not self.table.routes and self.rejection is None:
            return {}
        return {
            "backends": [
                {"name": name, "is_open": breaker.is_open}
                for name, breaker in self.breakers.items()
            ],
            "routes": [
                {
                    "model": route.model,
                    "aliases": list(route.aliases),
                    "egress": route.egress,
                    "targets": [f"{each.backend}:{each.model}" for each in route.targets],
                }
                for route in self.table.routes
            ],
            "routes_rejected": self.rejection,
        }

    async def close(self) -> None:
        for upstream in self.upstreams.values():
            await upstream.close()

    def _leaves_company(self, target: Target) -> bool:
        return target.backend != LOCAL and self.upstreams[target.backend].settings.leaves_company
