"""Token events of one completion become text events: a fold, so any replica can replay it."""

from collections.abc import Sequence

from router.events import Finished, Started, TextDelta, TextEvent, TextLogprobs
from router.generation import FinishReason, TokenEvent, TokenLogprobs
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer


class TextDecoder:
    """Feed every TokenEvent to `add`, in order. After `stop_string` is set the completion is over
    for the reader, though the engine may still run: the caller aborts it and finishes."""

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str], is_context_bound: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop_strings)
        self._is_context_bound = is_context_bound
        self._started = False
        self.stop_string: str | None = None

    def add(self, event: TokenEvent) -> list[TextEvent]:
        events: list[TextEvent] = []
        if not self._started:
            self._started = True
            events.append(Started(event.usage))
        token_ids, logprobs = event.token_ids, event.logprobs
        if event.finish_reason is FinishReason.STOP_TOKEN:  # it ends the text, it is not part of it
            token_ids, logprobs = token_ids[:-1], logprobs[:-1]
        text, self.stop_string = self._stops.add(self._detokenizer.add(token_ids))
        if self.stop_string is None and event.finish_reason is not None:
            text += self._last_text()
        if text or logprobs:
            events.append(TextDelta(text, self._text_logprobs(token_ids, logprobs)))
        if event.finish_reason is not None:
            events.append(self._finished(event.finish_reason, event))
        return events

    def _last_text(self) -> str:
        text, self.stop_string = self._stops.add(self._detokenizer.finish())
        return text if self.stop_string is not None else text + self._stops.finish()

    def _finished(self, reason: FinishReason, event: TokenEvent) -> Finished:
        if self.stop_string is not None:
            return Finished(FinishReason.STOP_STRING, event.usage, self.stop_string)
        if reason is FinishReason.LENGTH and self._is_context_bound:
            return Finished(FinishReason.CONTEXT_WINDOW, event.usage)
        return Finished(reason, event.usage)

    def _text_logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[TextLogprobs, ...]:
        return tuple(
            TextLogprobs(
                *self._shown(token_id),
                logprob=entry.logprob,
                top=tuple((*self._shown(other), logprob) for other, logprob in entry.top),
            )
            for token_id, entry in zip(token_ids, logprobs, strict=False)
        )

    def _shown(self, token_id: int) -> tuple[str, bytes]:
        return self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
