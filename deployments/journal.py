"""The events of one generation, kept by the engine shell from submit until they expire, so that a
generation outlives its reader and any later reader continues where the last one stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from router.errors import RouterError
from router.generation import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs, Usage


class Journal:
    """Tokens of one generation, its readers, and the deadline by which one must be there.

    Owned by one event loop. `deadline_s` is on the caller's clock: of the lease while the
    generation runs, of the retention once it has ended. `on_change` is told of all that is new.
    """

    def __init__(self, request: GenerationRequest, deadline_s: float) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.num_readers = 0
        self.on_change: Callable[[Journal], None] | None = None
        self.ended_s: float | None = None
        self.is_acknowledged = False  # accounted for: nothing is lost when it is forgotten
        self.claimed_until_s = 0.0
        self.usage = Usage(len(request.prompt_token_ids), 0, 0)
        self.finish_reason: FinishReason | None = None
        self.error: RouterError | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def append(self, event: TokenEvent) -> None:
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(event.logprobs)
        self.usage = event.usage
        self.finish_reason = event.finish_reason
        self._wake_readers()

    def fail(self, error: RouterError) -> None:
        """The generation broke: every reader gets what there is, then the error."""
        if not self.has_ended:
            self.error = error
            self._wake_readers()

    async def read(self, after_index: int) -> AsyncGenerator[list[TokenEvent], None]:
        """Everything from position `after_index` on, coalesced, up to the last event."""
        index = after_index
        while True:
            if index < self.num_tokens or self.finish_reason is not None:
                event = self.event_from(index)
                index = self.num_tokens
                yield [event]
                if event.finish_reason is not None:
                    return
            elif self.error is not None:
                raise self.error
            else:
                await self._change()

    async def ended(self) -> None:
        """Returns once the generation has ended, one way or the other."""
        while not self.has_ended:
            await self._change()

    def event_from(self, index: int) -> TokenEvent:
        """All that there is from position `index` on, in one event."""
        return TokenEvent(
            request_id=self.request.request_id,
            index=index,
            token_ids=tuple(self._token_ids[index:]),
            usage=self.usage,
            logprobs=tuple(self._logprobs[index:]),
            finish_reason=self.finish_reason,
        )

    async def _change(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake_readers(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():  # cancelled
                each.set_result(None)
        if self.on_change is not None:
            self.on_change(self)
