"""What an engine owes each request, and what it was seen to give."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from benchmarks.soak.load import Request
from engine.engine import EngineTotals
from engine.outputs import SequenceOutput, Usage
from engine.sequence import FinishReason

MAX_SHOWN = 20


@dataclass(slots=True)
class _Live:
    request: Request
    num_told: int = 0
    aborted_with: Usage | None = None


class Ledger:
    """Holds the live requests alone: it must not grow with time. `faults` counts, `shown` says the
    first ones in words."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.shown: list[str] = []
        self.ended: Counter[str] = Counter()  # by reason
        self.num_begun = self.num_rests = 0
        self._live: dict[str, _Live] = {}
        self._sums = Counter(prompt_tokens=0, cached_tokens=0, completion_tokens=0)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def abortable(self) -> list[str]:
        return [seq_id for seq_id, one in self._live.items() if one.aborted_with is None]

    @property
    def num_told(self) -> int:
        """Tokens of requests that have ended."""
        return self._sums["completion_tokens"]

    @property
    def num_cached(self) -> int:
        return self._sums["cached_tokens"]

    def begin(self, request: Request) -> None:
        self.num_begun += 1
        self._live[request.seq_id] = _Live(request)

    def abort(self, seq_id: str, usage: Usage | None) -> None:
        """`usage` is what the engine said to the abort of a live request, its first."""
        self._require(usage is not None, "ends", f"{seq_id} was live and not found by its abort")
        self._live[seq_id].aborted_with = usage

    def book(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            one = self._live.get(output.seq_id)
            if one is None:
                self.fault("ends", f"{output.seq_id} was told more after its end")
                continue
            one.num_told += len(output.token_ids)
            self._check(output, one)
            if output.finish_reason is not None:
                self._end(output, one)

    def close(self, totals: EngineTotals, num_blocks_missing: int) -> None:
        """The engine says that it has no work left."""
        for seq_id in self._live:
            self.fault("ends", f"{seq_id} never ended")
        theirs = asdict(totals)
        ours = {**self._sums, "finished_sequences": self.ended.total()}
        for name, value in ours.items():
            told = f"totals say {theirs[name]} {name}, {value} were told"
            self._require(theirs[name] == value, "totals", told)
        self._require_free(num_blocks_missing)

    def idle(self, num_blocks_missing: int) -> None:
        """All requests have ended by themselves, or by an abort that came long before."""
        self.num_rests += 1
        self._require_free(num_blocks_missing)

    def _require_free(self, num_blocks_missing: int) -> None:
        left = f"{num_blocks_missing} blocks are not free in an idle engine"
        self._require(num_blocks_missing == 0, "blocks", left)

    def fault(self, kind: str, words: str) -> None:
        self.faults[kind] += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(words)

    def _check(self, output: SequenceOutput, one: _Live) -> None:
        seq_id, params = output.seq_id, one.request.params
        self._require(one.num_told <= params.max_tokens, "ends", f"{seq_id} was told too much")
        wanted = 0 if params.num_logprobs is None else len(output.token_ids)
        has_all = len(output.logprobs) == wanted
        self._require(has_all, "ends", f"{seq_id} has {len(output.logprobs)} logprobs of {wanted}")
        is_finite = all(math.isfinite(each.logprob) for each in output.logprobs)
        self._require(is_finite, "ends", f"{seq_id} has a log probability that is no number")
        if one.aborted_with is not None:
            is_last = output.finish_reason is FinishReason.ABORT and not output.token_ids
            self._require(is_last, "ends", f"{seq_id} was told tokens after its abort")

    def _end(self, output: SequenceOutput, one: _Live) -> None:
        del self._live[output.seq_id]
        usage, reason = output.usage, output.finish_reason
        assert reason is not None
        self.ended[reason.value] += 1
        self._sums.update(asdict(usage))
        counted = f"{output.seq_id} counts {usage}, {one.num_told} tokens were told"
        self._require(usage.completion_tokens == one.num_told, "totals", counted)
        is_right_prompt = usage.prompt_tokens == len(one.request.prompt)
        self._require(is_right_prompt, "totals", counted)
        params = one.request.params
        fits = {
            FinishReason.ABORT: usage == one.aborted_with,
            FinishReason.LENGTH: one.num_told == params.max_tokens,
            FinishReason.STOP_TOKEN: output.token_ids[-1:] != ()
            and output.token_ids[-1] in params.stop_token_ids,
        }
        self._require(fits[reason], "ends", f"{output.seq_id} ended by {reason.value}: {usage}")

    def _require(self, holds: bool, kind: str, words: str) -> None:
        if not holds:
            self.fault(kind, words)
