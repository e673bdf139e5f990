"""Steps of the exact cache planned by hand, as `TieredPlans` plans those of a tiered one; and what
it holds replaced, block by block, by what a format gives back of it."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count
from typing import Self

import torch

from benchmarks.quality.formats import Format
from benchmarks.quality.settings import Emulated
from engine.cache.tier_config import Ages, TierConfig
from engine.execution.kv_tensors import KVTensors
from engine.execution.uploads import upload
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence, SequenceStatus

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_names = count()


class PagedPlans:
    """A sequence has blocks for all it can become from the start."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._free = list(range(num_blocks))
        self._blocks_each = -(-max_model_len // block_size)

    def open(self, token_ids: Items[int]) -> Sequence:
        assert len(self._free) >= self._blocks_each, "a sequence too many"
        blocks, self._free = self._free[: self._blocks_each], self._free[self._blocks_each :]
        return Sequence(
            f"exact-{next(_names)}",
            list(token_ids),
            len(token_ids),
            GREEDY,
            status=SequenceStatus.RUNNING,
            block_table=blocks,
        )

    def close(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        self._free += sequence.block_table

    def plan(self, *chunks: tuple[Sequence, int]) -> ScheduledBatch:
        """(sequence, number of tokens to compute next) for each sequence of the step."""
        return ScheduledBatch(
            tuple(
                ScheduledSequence(sequence, sequence.num_computed_tokens, num_new_tokens)
                for sequence, num_new_tokens in chunks
            )
        )

    def book(self, batch: ScheduledBatch) -> None:
        for entry in batch.scheduled:
            entry.sequence.num_computed_tokens = entry.end


@dataclass(slots=True)
class Aging:
    """How far a sequence has come, in blocks: those before are replaced, or are its sink."""

    emulated: Emulated
    num_warm: int
    num_cold: int

    @classmethod
    def of(cls, emulated: Emulated) -> Self:
        num_sinks = emulated.tiers.sink_tokens // emulated.tiers.block_size
        return cls(emulated, num_sinks, num_sinks)

    def move_to(self, ages: Ages) -> Iterator[tuple[Format, range]]:
        """The blocks that are to be replaced, each once."""
        emulated, warm, cold = self.emulated, self.num_warm, self.num_cold
        yield emulated.cold_of_warm, range(cold, min(warm, ages.warm_start))
        yield emulated.cold, range(max(warm, cold), ages.warm_start)
        if emulated.warm is not None:
            yield emulated.warm, range(max(warm, ages.warm_start), ages.hot_start)
        self.num_warm, self.num_cold = max(warm, ages.hot_start), max(cold, ages.warm_start)


class EmulatedAges:
    """What is not hot any more for the first token of a step is replaced before it: so a chunk of a
    prompt must end where a cell does, and one behind the prompt where a block does."""

    def __init__(self, kv: KVTensors) -> None:
        self._kv = kv
        self._agings: dict[Sequence, Aging] = {}

    def put(self, sequence: Sequence, emulated: Emulated) -> None:
        self._agings[sequence] = Aging.of(emulated)

    def forget(self, sequence: Sequence) -> None:
        self._agings.pop(sequence, None)

    def advance(self, batch: ScheduledBatch) -> None:
        """Before `batch` is launched."""
        due: dict[Format, list[int]] = {}
        for entry in batch.scheduled:
            aging = self._agings.get(entry.sequence)
            if aging is not None:
                for stored, blocks in aging.move_to(_ages(aging.emulated.tiers, entry)):
                    if blocks:
                        ids = entry.block_table[blocks.start : blocks.stop]
                        due.setdefault(stored, []).extend(ids)
        for stored, ids in due.items():
            self._replace(stored, ids)

    def _replace(self, stored: Format, blocks: list[int]) -> None:
        """In all layers."""
        ids = upload(blocks, self._kv.device)
        for tensors, back in (
            (self._kv.keys, stored.keys_back),
            (self._kv.values, stored.values_back),
        ):
            exact = torch.stack([each.index_select(0, ids) for each in tensors])
            for each, replaced in zip(tensors, back(exact).to(self._kv.dtype), strict=True):
                each.index_copy_(0, ids, replaced)


def _ages(tiers: TierConfig, entry: ScheduledSequence) -> Ages:
    is_prompt = entry.start < entry.sequence.num_prompt_tokens
    return tiers.prefill_ages(entry.start) if is_prompt else tiers.decode_ages(entry.start)
