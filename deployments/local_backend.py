"""The local engine as a router backend: Serve handle calls in, the router's errors out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextvars import Context
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from router.backends.base import BackendStatus, OrphanedGeneration
from router.errors import BackendError, BackendUnavailable, RouterError
from router.generation import GenerationRequest, TokenEvent, Usage

STATUS_TIMEOUT_S = 2.0
SUBMIT_TIMEOUT_S = 30.0  # Serve holds a call back while no replica is up


class LocalBackend:
    """Renews the leases of all generations it reads, one call for all of them."""

    def __init__(self, engine: Any, lease_s: float) -> None:
        self._engine = engine
        self._lease_s = lease_s
        self._reading: set[str] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def submit(self, request: GenerationRequest) -> None:
        try:
            async with asyncio.timeout(SUBMIT_TIMEOUT_S):
                await self._call("submit", request)
        except TimeoutError as exc:
            raise BackendUnavailable(
                f"no engine took the request within {SUBMIT_TIMEOUT_S:.0f} s", retry_after_s=10
            ) from exc

    async def subscribe(
        self, request_id: str, after_index: int = 0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        self._keep_renewing()
        self._reading.add(request_id)
        stream = self._engine.options(stream=True).subscribe.remote(request_id, after_index)
        try:
            async for events in stream:
                yield events
        except (RayError, RayServeException) as exc:
            raise as_router_error(exc) from exc
        finally:
            self._reading.discard(request_id)
            stream.cancel()

    async def abort(self, request_id: str) -> Usage | None:
        usage: Usage | None = await self._outlive("abort", request_id)
        return usage

    async def acknowledge(self, request_ids: Sequence[str]) -> None:
        await self._outlive("acknowledge", list(request_ids))

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        orphans: list[OrphanedGeneration] = await self._call("claim_orphans")
        return orphans

    async def status(self) -> BackendStatus:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status: BackendStatus = await self._call("status")
                return status
        except RouterError as exc:
            return BackendStatus(ready=False, reason=exc.message)
        except TimeoutError:
            return BackendStatus(
                ready=False, reason=f"the engine did not answer within {STATUS_TIMEOUT_S:.0f} s"
            )

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._engine, method).remote(*arguments)
        except (RayError, RayServeException) as exc:
            raise as_router_error(exc) from exc

    async def _outlive(self, method: str, *arguments: Any) -> Any:
        """A call that outlives the request it is made for: Serve cancels the calls of a cancelled
        request, and knows them by their context."""
        call = asyncio.create_task(self._call(method, *arguments), context=Context())
        return await asyncio.shield(call)

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
                await self._call("renew", list(self._reading))


def as_router_error(exc: Exception) -> RouterError:
    """The replica's own error when it raised one of ours; else what its caller can do."""
    if isinstance(exc, RayTaskError) and isinstance(exc.cause, RouterError):
        return exc.cause
    if isinstance(exc, RayTaskError) and not isinstance(exc.cause, RayError):
        return BackendError("the engine failed on this request")
    if isinstance(exc, RayActorError | RayTaskError | RayServeException):
        return BackendUnavailable("the engine died and is being restarted", retry_after_s=10)
    return BackendUnavailable("the engine cannot be reached", retry_after_s=10)
