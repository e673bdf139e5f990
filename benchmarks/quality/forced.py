"""Every token of real text is given, whatever was said: what a cache would have said, held against
what the exact cache says, token by token."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Self

import torch

from benchmarks.quality.intervals import Interval, Numbers, means_along
from benchmarks.quality.session import Session
from benchmarks.quality.settings import Setting
from benchmarks.quality.texts import Text

SCORED_FROM = 1024  # the first token whose distribution counts; those before are the prompt
FOLDED_STEPS = 16  # whose logits are looked at together
STRETCH_TOKENS = 512

Windows = Items[Items[int]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one setting on one text, [num_windows, num_scored] each: KL(exact || setting) in nats,
    whether the likeliest token is the same, and how much less likely the text's own token is, in
    nats."""

    kl: Numbers
    agrees: Numbers
    delta_nll: Numbers

    def above(self, floor: Self) -> Interval:
        """The KL without that of `floor`: of the engine's own rounding."""
        return Interval.of(self.kl - floor.kl)

    def as_json(self) -> dict[str, object]:
        """Means with intervals; and the KL of each window, and along them, from position
        `SCORED_FROM` on."""
        return {
            "kl": Interval.of(self.kl).as_json(),
            "top1": Interval.of(self.agrees).as_json(),
            "delta_nll": Interval.of(self.delta_nll).as_json(),
            "kl_by_window": self.kl.mean(-1).tolist(),
            "kl_by_position": means_along(self.kl, STRETCH_TOKENS),
        }


@dataclass(frozen=True, slots=True)
class Exact:
    """logits [num_scored, num_windows, vocab_size] float32 of the exact cache alone; targets
    [num_scored, num_windows] int64: the text's own tokens."""

    windows: Windows
    logits: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, session: Session, texts: Items[Text], device: str) -> Self:
        windows = [window for text in texts for window in text.windows]
        num_scored = len(windows[0]) - SCORED_FROM
        shape = (num_scored, len(windows), session.vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=device)

        def take(position: int, came: torch.Tensor) -> None:
            logits[position + 1 - SCORED_FROM].copy_(came)

        session.force(windows, [None] * len(windows), SCORED_FROM, take)
        targets = torch.tensor([window[SCORED_FROM:] for window in windows], device=device)
        return cls(windows, logits, targets.T.contiguous())


class Comparison:
    """Of settings that decode in one batch: of each the windows, in order."""

    def __init__(self, exact: Exact, num_settings: int) -> None:
        self._exact = exact
        num_scored, num_windows, vocab_size = exact.logits.shape
        shape = (FOLDED_STEPS, num_settings, num_windows, vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=exact.logits.device)
        self._num_kept = self._num_folded = 0
        shape = (3, num_scored, num_settings, num_windows)
        self._scores = torch.empty(shape, dtype=torch.float64, device=exact.logits.device)

    def take(self, position: int, came: torch.Tensor) -> None:
        assert position + 1 - SCORED_FROM == self._num_folded + self._num_kept, position
        self._logits[self._num_kept].view_as(came).copy_(came)
        self._num_kept += 1
        if self._num_kept == FOLDED_STEPS:
            self._fold()

    def scores(self) -> Items[torch.Tensor]:
        """Of each setting [3, num_windows, num_scored] float64."""
        self._fold()
        assert self._num_folded == self._scores.shape[1]
        return self._scores.permute(2, 0, 3, 1).cpu().unbind()

    @torch.inference_mode()
    def _fold(self) -> None:
        steps = slice(self._num_folded, self._num_folded + self._num_kept)
        exact = self._exact.logits[steps, None].double().log_softmax(-1)
        came = self._logits[: self._num_kept].double().log_softmax(-1)
        self._scores[0, steps] = (exact.exp() * (exact - came)).sum(-1)
        self._scores[1, steps] = (exact.argmax(-1) == came.argmax(-1)).double()
        targets = self._exact.targets[steps, None, :, None].expand(*came.shape[:-1], 1)
        self._scores[2, steps] = (
            exact.expand_as(came).gather(-1, targets) - came.gather(-1, targets)
        )[..., 0]
        self._num_folded, self._num_kept = steps.stop, 0


def compare(
    session: Session, exact: Exact, settings: Items[Setting], texts: Items[Text]
) -> Iterator[tuple[Setting, Text, Scores]]:
    """All that settings of one cache come to."""
    comparison = Comparison(exact, len(settings))
    windows = [window for _ in settings for window in exact.windows]
    emulated = [setting.emulated for setting in settings for _ in exact.windows]
    session.force(windows, emulated, SCORED_FROM, comparison.take)
    for setting, scores in zip(settings, comparison.scores(), strict=True):
        of_texts = torch.split(scores, [len(text.windows) for text in texts], dim=1)
        for text, of_text in zip(texts, of_texts, strict=True):
            kl, agrees, delta_nll = of_text.numpy()
            yield setting, text, Scores(kl, agrees, delta_nll)
