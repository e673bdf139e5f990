"""One request end to end: render, submit, read, decode; on any way out, nothing is left running."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from router.backends.base import Backend
from router.catalog import Catalog, ServedModel
from router.chat import ChatRequest
from router.completion import Completion
from router.errors import RouterError
from router.events import Finished, TextEvent
from router.generation import FinishReason, GenerationRequest, Usage
from router.identity import Principal
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

    async def count_tokens(self, chat: ChatRequest) -> int:
        model = self.catalog.resolve(chat.model)
        return len(await _off_loop(chat, model))

    async def start(
        self, chat: ChatRequest, principal: Principal, request_id: str
    ) -> "RunningGeneration":
        """Validate, then submit. Raises RouterError; then nothing runs."""
        started_s = time.monotonic()
        model = self.catalog.resolve(chat.model)
        prompt = await _off_loop(chat, model)
        budget = token_budget(chat.max_tokens, len(prompt), model)
        requests = generation_requests(chat, model, prompt, budget, principal, request_id)
        running = RunningGeneration(self.backend, self.metrics, started_s)
        try:
            for request in requests:
                decoder = TextDecoder(model.tokenizer, chat.stop_strings, budget.is_context_bound)
                await running.submit(request, decoder)
        except BaseException:
            await running.close()
            raise
        return running

    async def complete(
        self, chat: ChatRequest, principal: Principal, request_id: str
    ) -> list[Completion]:
        """Every completion, whole."""
        running = await self.start(chat, principal, request_id)
        completions = [Completion() for _ in range(running.num_choices)]
        async with contextlib.aclosing(running.events()) as events:
            async for choice, event in events:
                completions[choice].add(event)
        return completions


class RunningGeneration:
    """The completions of one request while they run. `close` is idempotent and always awaited."""

    def __init__(self, backend: Backend, metrics: RouterMetrics, started_s: float) -> None:
        self._backend = backend
        self._metrics = metrics
        self._started_s = started_s
        self._choices: list[tuple[str, TextDecoder]] = []
        self._unfinished: set[str] = set()

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    async def submit(self, request: GenerationRequest, decoder: TextDecoder) -> None:
        """Start one more choice. Raises RouterError when the backend refuses it."""
        self._unfinished.add(request.request_id)  # first: a cancelled submit may have arrived
        try:
            await self._backend.submit(request)
        except RouterError:
            self._unfinished.discard(request.request_id)
            raise
        self._choices.append((request.request_id, decoder))

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
        unfinished, self._unfinished = self._unfinished, set()
        for request_id in unfinished:
            self._metrics.aborted()
            await asyncio.shield(_abort_quietly(self._backend, request_id))

    async def _choice_events(self, choice: int) -> AsyncGenerator[ChoiceEvent, None]:
        request_id, decoder = self._choices[choice]
        timing = self._metrics.timing(self._started_s)
        subscription = self._backend.subscribe(request_id)
        async for batch in subscription:
            for token_event in batch:
                timing.tokens(len(token_event.token_ids))
                for event in decoder.add(token_event):
                    if isinstance(event, Finished):
                        self._unfinished.discard(request_id)
                        timing.finished(event)
                    yield choice, event
                if decoder.stop_string is not None:
                    if request_id in self._unfinished:
                        finished = await self._stop(request_id, decoder, token_event.usage)
                        timing.finished(finished)
                        yield choice, finished
                    return

    async def _stop(self, request_id: str, decoder: TextDecoder, last_seen: Usage) -> Finished:
        """A stop string ended the text: the engine's own final usage is what is reported."""
        self._unfinished.discard(request_id)
        usage = await asyncio.shield(self._backend.abort(request_id))
        return Finished(FinishReason.STOP_STRING, usage or last_seen, decoder.stop_string)


async def _off_loop(chat: ChatRequest, model: ServedModel) -> tuple[int, ...]:
    """Long prompts are tokenised in a thread (the tokenizer releases the GIL)."""
    if sum(len(turn.text) for turn in chat.messages) < 16_384:
        return prompt_token_ids(chat, model)
    return await asyncio.to_thread(prompt_token_ids, chat, model)


async def _abort_quietly(backend: Backend, request_id: str) -> None:
    try:
        await backend.abort(request_id)
    except RouterError as exc:
        logger.warning("abort failed request_id=%s error=%s", request_id, exc)


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
