"""One request end to end: render, submit, read, decode; on any way out, nothing is left running."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from router.account import Outcome, RequestAccount
from router.accounting import Accounting
from router.backends.base import Backend
from router.capabilities import check_features
from router.catalog import Catalog, ServedModel
from router.chat import ChatRequest
from router.completion import Completion
from router.errors import RouterError
from router.events import Finished, TextEvent
from router.generation import FinishReason, GenerationRequest, TokenEvent, Usage
from router.limits.fair_queue import FairQueue
from router.limits.policy import est_output_tokens
from router.metrics import RouterMetrics
from router.prompt import generation_requests, prompt_token_ids, token_budget
from router.text.text_decoder import TextDecoder

logger = logging.getLogger(__name__)

ChoiceEvent = tuple[int, TextEvent]


@dataclass(frozen=True, slots=True)
class Pipeline:
    catalog: Catalog
    backend: Backend
    metrics: RouterMetrics
    accounting: Accounting
    queue: FairQueue

    async def count_tokens(self, chat: ChatRequest) -> int:
        model = self.catalog.resolve(chat.model)
        check_features(chat.features, model.capabilities)
        return len(await _off_loop(chat, model))

    async def start(self, chat: ChatRequest, account: RequestAccount) -> "RunningGeneration":
        """Validate, admit, wait for a place, submit. Raises RouterError; then nothing runs."""
        account.model, account.is_stream = chat.model, chat.stream
        model = self.catalog.resolve(chat.model)
        account.model = model.id
        check_features(chat.features, model.capabilities)
        prompt = await _off_loop(chat, model)
        budget = token_budget(chat.max_tokens, len(prompt), model)
        requests = generation_requests(chat, model, prompt, budget, account)
        await self.accounting.admit(account, requests)
        running = RunningGeneration(self.backend, self.metrics, account)
        try:
            place = self.queue.slot(self.accounting.team_of(account), _est_tokens(requests))
            await running.hold(place)
            for request in requests:
                decoder = TextDecoder(model.tokenizer, chat.stop_strings, budget.is_context_bound)
                await running.submit(request, decoder)
        except BaseException:
            await running.close()
            raise
        return running

    async def complete(self, chat: ChatRequest, account: RequestAccount) -> list[Completion]:
        """Every completion, whole."""
        running = await self.start(chat, account)
        completions = [Completion() for _ in range(running.num_choices)]
        async with contextlib.aclosing(running.events()) as events:
            async for choice, event in events:
                completions[choice].add(event)
        return completions


class RunningGeneration:
    """The completions of one request while they run. `close` is idempotent and always awaited;
    after it, the account holds the final usage of every completion."""

    def __init__(self, backend: Backend, metrics: RouterMetrics, account: RequestAccount) -> None:
        self._backend = backend
        self._metrics = metrics
        self._account = account
        self._choices: list[tuple[str, TextDecoder]] = []
        self._unfinished: set[str] = set()
        self._held = contextlib.AsyncExitStack()
        self._closing: asyncio.Task[None] | None = None
        account.end_generations = self.close

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    async def hold(self, place: contextlib.AbstractAsyncContextManager[None]) -> None:
        """Keep a place in the queue until `close`. Raises Overloaded."""
        await self._held.enter_async_context(place)

    async def submit(self, request: GenerationRequest, decoder: TextDecoder) -> None:
        """Start one more choice. Raises RouterError when the backend refuses it."""
        request_id = request.request_id
        self._unfinished.add(request_id)  # first: a cancelled submit may have arrived
        self._saw(request_id, Usage(len(request.prompt_token_ids), 0, 0))
        try:
            await self._backend.submit(request)
        except RouterError:
            self._unfinished.discard(request_id)
            del self._account.generations[request_id]
            raise
        self._choices.append((request_id, decoder))

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Text events of all choices as they come. Leaving early aborts what still runs."""
        try:
            choices = [self._choice_events(choice) for choice in range(self.num_choices)]
            merged = choices[0] if len(choices) == 1 else _merge(choices)
            async with contextlib.aclosing(merged) as stream:
                async for choice_event in stream:
                    yield choice_event
        finally:
            await self.close()

    async def close(self) -> None:
        """Abort what is still running; survives the cancellation of its caller."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        unfinished, self._unfinished = self._unfinished, set()
        for request_id in unfinished:
            self._metrics.aborted()
            usage = await self._abort(request_id)
            if usage is not None:
                self._ended(request_id, usage, FinishReason.ABORT)
        await self._held.aclose()

    async def _choice_events(self, choice: int) -> AsyncGenerator[ChoiceEvent, None]:
        request_id, decoder = self._choices[choice]
        timing = self._metrics.timing(self._account.started_s)
        async with contextlib.aclosing(self._backend.subscribe(request_id)) as subscription:
            async for batch in subscription:
                for token_event in batch:
                    self._saw(request_id, token_event.usage)
                    timing.tokens(len(token_event.token_ids))
                    for event in await self._decode(request_id, decoder, token_event):
                        if isinstance(event, Finished):
                            timing.finished(event)
                        yield choice, event
                    if request_id not in self._unfinished:
                        return

    async def _decode(
        self, request_id: str, decoder: TextDecoder, token_event: TokenEvent
    ) -> list[TextEvent]:
        """The text of a token event; a stop string in it ends the generation."""
        events = decoder.add(token_event)
        if token_event.token_ids:
            self._account.saw_token()
        if token_event.finish_reason is not None:
            self._unfinished.discard(request_id)
            self._ended(request_id, token_event.usage, token_event.finish_reason)
        elif decoder.stop_string is not None:
            usage = await self._abort(request_id)
            self._unfinished.discard(request_id)  # last: cancelled above, `close` asks again
            final = usage or token_event.usage
            is_exact = usage is not None
            self._account.generations[request_id] = Outcome(
                final, FinishReason.STOP_STRING, is_exact
            )
            events.append(Finished(FinishReason.STOP_STRING, final, decoder.stop_string))
        return events

    async def _abort(self, request_id: str) -> Usage | None:
        try:
            return await self._backend.abort(request_id)
        except RouterError as exc:
            logger.warning("abort failed request_id=%s error=%s", request_id, exc)
            return None

    def _saw(self, request_id: str, usage: Usage) -> None:
        self._account.generations[request_id] = Outcome(usage)

    def _ended(self, request_id: str, usage: Usage, reason: FinishReason) -> None:
        self._account.generations[request_id] = Outcome(usage, reason, is_exact=True)


def _est_tokens(requests: Sequence[GenerationRequest]) -> int:
    return sum(
        len(request.prompt_token_ids) + est_output_tokens(request.sampling.max_tokens)
        for request in requests
    )


async def _off_loop(chat: ChatRequest, model: ServedModel) -> tuple[int, ...]:
    """Long prompts are tokenised in a thread (the tokenizer releases the GIL)."""
    if sum(len(turn.text) for turn in chat.messages) < 16_384:
        return prompt_token_ids(chat, model)
    return await asyncio.to_thread(prompt_token_ids, chat, model)


async def _merge(
    streams: Sequence[AsyncIterator[ChoiceEvent]],
) -> AsyncGenerator[ChoiceEvent, None]:
    """Events of all streams in order of arrival; the first failure ends all of them."""
    arrived: asyncio.Queue[ChoiceEvent | BaseException | None] = asyncio.Queue(maxsize=64)

    async def drain(stream: AsyncIterator[ChoiceEvent]) -> None:
        try:
            async for event in stream:
                await arrived.put(event)
            await arrived.put(None)
        except Exception as exc:
            await arrived.put(exc)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            event = await arrived.get()
            if event is None:
                num_open -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
