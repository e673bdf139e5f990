"""The fold of one completion's text events into the whole completion."""

from dataclasses import dataclass, field
from typing import assert_never

from router.events import Finished, Started, TextDelta, TextEvent, TextLogprobs
from router.generation import FinishReason, Usage


@dataclass(slots=True)
class Completion:
    """Grows with `add`; complete once `reason` is set."""

    parts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprobs] = field(default_factory=list)
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    reason: FinishReason | None = None
    stop_string: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, event: TextEvent) -> None:
        match event:
            case Started(usage=usage):
                self.usage = usage
            case TextDelta(text=text, logprobs=logprobs):
                self.parts.append(text)
                self.logprobs.extend(logprobs)
            case Finished(reason=reason, usage=usage, stop_string=stop_string):
                self.reason, self.usage, self.stop_string = reason, usage, stop_string
            case _:
                assert_never(event)
