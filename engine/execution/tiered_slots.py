"""What the device keeps of sequences in a tiered cache: which slabs they read, by layer group."""

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from engine.cache.formats import Part
from engine.cache.guarded_queue import Ids
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_span import TieredSpan
from engine.execution.sequence_slots import Slots
from engine.execution.tiered_inputs import table_width
from engine.execution.uploads import upload_together
from engine.scheduling.batch import ScheduledSequence
from engine.sequence import Sequence

Places = npt.NDArray[np.int64]


class TieredSlots(Slots):
    """Tables are those of sequences that decode: of a prompt a step brings its own. What changes as
    tokens age is near the end of a column, and only that is uploaded.

    `tables`: of each layer group, keys and values, [num_slots + 1, most slabs of a sequence] int32.
    """

    def __init__(
        self,
        num_slots: int,
        configs: Items[TierConfig],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """`configs` by layer group."""
        super().__init__(num_slots, device)
        widths = [_most_slabs(config, part, max_model_len) for config in configs for part in Part]
        self._widths = widths
        sizes = [(num_slots + 1) * width for width in widths]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        shares = self._all.split(sizes)
        self.tables = tuple(
            tuple(shares[len(Part) * group + part].view(num_slots + 1, -1) for part in Part)
            for group in range(len(configs))
        )
        self._columns: dict[Sequence, list[Ids]] = {}  # as the device has them

    def _write(self, scheduled: Items[ScheduledSequence], slots: Items[int]) -> None:
        places: list[Places] = []
        slabs: list[Ids] = []
        for entry, slot in zip(scheduled, slots, strict=True):
            if entry.spans[0].is_decode:
                self._change(entry.sequence, slot, entry.spans[0], places, slabs)
        if places:
            changes = np.concatenate(places), np.concatenate(slabs)
            where, what = upload_together(tuple(map(torch.from_numpy, changes)), self.device)
            self._all.index_copy_(0, where, what)

    def _change(
        self,
        sequence: Sequence,
        slot: int,
        span: TieredSpan,
        places: list[Places],
        slabs: list[Ids],
    ) -> None:
        columns = [view.slabs(part) for view in span.views for part in Part]
        known = self._columns.get(sequence, [_NONE] * len(columns))
        for number, (was, now) in enumerate(zip(known, columns, strict=True)):
            if now is was:
                continue
            width = self._widths[number]
            assert len(now) <= width, (len(now), width)
            first, start = _first_change(was, now), self._starts[number] + slot * width
            places.append(np.arange(start + first, start + len(now), dtype=np.int64))
            slabs.append(now[first:])
        self._columns[sequence] = columns

    def _forget(self, sequence: Sequence) -> None:
        self._columns.pop(sequence, None)


_NONE: Ids = np.zeros(0, np.int32)


def _first_change(was: Ids, now: Ids) -> int:
    num_common = min(len(was), len(now))
    differs = was[:num_common] != now[:num_common]
    return int(differs.argmax()) if differs.any() else num_common


def _most_slabs(config: TierConfig, part: Part, max_model_len: int) -> int:
    """Of a sequence that decodes: it never gets fewer while it grows."""
    ages = config.decode_ages(max_model_len - 1)
    return table_width(config.num_slabs(ages, max_model_len, part))
