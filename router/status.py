"""What this entry serves and how it is doing, as JSON for people's tools and the web console."""

import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.backends.base import Backend, BackendStatus
from router.catalog import Catalog, ServedModel
from router.errors import RouterError
from router.identity import Principal

Authenticate = Callable[[Request], Awaitable[Principal]]

LimitsOf = Callable[[Principal], Awaitable[Mapping[str, Any] | None]]
"""The caller's limits by name, such as `{"requests_per_minute": {"limit": 60, "remaining": 41}}`;
None when nothing limits it. May raise RouterError."""


@dataclass(frozen=True, slots=True)
class StatusEndpoint:
    """`authenticate` raises AuthenticationFailed. `started_s` is `time.monotonic` of this replica's
    start."""

    catalog: Catalog
    backend: Backend
    authenticate: Authenticate
    limits_of: LimitsOf | None = None
    routing: Callable[[], Mapping[str, Any]] = dict
    started_s: float = field(default_factory=time.monotonic)

    async def status(self, request: Request) -> Response:
        principal = await self.authenticate(request)
        body = {
            "name": "flashray",
            "version": _version(),
            "uptime_s": round(time.monotonic() - self.started_s, 3),
            "team": principal.team,
            "models": [_model_body(model, self.catalog) for model in self.catalog.models.values()],
            **_backend_body(await self.backend.status()),
            **await self._limits_body(principal),
            **self.routing(),
        }
        return JSONResponse(body, headers={"cache-control": "no-store"})

    async def _limits_body(self, principal: Principal) -> dict[str, Any]:
        """A store that does not answer takes away the limits, not the status."""
        try:
            limits = await self.limits_of(principal) if self.limits_of else None
        except RouterError as exc:
            return {"limits": None, "limits_reason": exc.message}
        return {"limits": limits, "limits_reason": ""}


def _model_body(model: ServedModel, catalog: Catalog) -> dict[str, Any]:
    return {
        "id": model.id,
        "display_name": model.display_name,
        "aliases": [
            name
            for name in catalog.names
            if name != model.id and catalog.resolve(name).id == model.id
        ],
        "max_model_len": model.max_model_len,
        "can_chat": model.chat_template is not None,
    }


def _backend_body(status: BackendStatus) -> dict[str, Any]:
    return {
        "ready": status.ready,
        "reason": status.reason,
        "engine": {
            "num_running": status.num_running,
            "num_waiting": status.num_waiting,
            "prompt_tokens_total": status.prompt_tokens_total,
            "cached_tokens_total": status.cached_tokens_total,
            "completion_tokens_total": status.completion_tokens_total,
            "preemptions_total": status.preemptions_total,
        },
        "kv_tiers": [
            {
                "name": "device",
                "num_blocks": status.num_blocks,
                "num_used_blocks": status.num_blocks - status.num_free_blocks,
            }
        ],
        "cold_tier": {
            "spilled_blocks_total": status.cold_spilled_blocks_total,
            "dropped_blocks_total": status.cold_dropped_blocks_total,
            "restored_blocks_total": status.cold_restored_blocks_total,
            "missed_blocks_total": status.cold_missed_blocks_total,
            "corrupt_blocks_total": status.cold_corrupt_blocks_total,
        },
    }


def _version() -> str | None:
    """None when the code runs from a folder that was never installed."""
    try:
        return importlib.metadata.version("flashray")
    except importlib.metadata.PackageNotFoundError:
        return None
