"""The keys of a sequence as a step's attention finds them, in a cache of either kind."""

from collections.abc import Sequence as Items
from typing import Protocol

import torch

from engine.cache.formats import BLOCK_SIZE, BlockFormat, Format, Part
from engine.cache.kv_arenas import AFFINE_BYTES
from engine.execution.attention_trace import EXACT, TIERS, TierRun
from engine.execution.kv_tensors import KVTensors
from engine.execution.tiered_kv import TieredKV, formats_of
from engine.scheduling.batch import ScheduledSequence
from kernels.rotary.api import rotary
from kernels.tiered_append.hadamard import rotated
from kernels.tiered_append.reference import turned
from kernels.tiered_decode.reference import dequantised

BF16_BYTES = 2


class StoredKeys(Protocol):
    """Of layers that have stored the tokens of `entry` already."""

    layer_groups: tuple[tuple[int, ...], ...]

    def turned(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The query as it meets the keys; shapes as of `engine.models.decoder.Attend`."""

    def read(self, layer: int, entry: ScheduledSequence) -> torch.Tensor:
        """[num_kv_heads, entry.end, head_dim] float64: what its last new token sees."""

    def runs(self, entry: ScheduledSequence) -> tuple[tuple[TierRun, ...], ...]:
        """By layer group."""


class PagedKeys:
    """A layer group has one window: keys a query sees, None for all."""

    def __init__(self, kv: KVTensors, windows: Items[int | None]) -> None:
        """`windows` of the layers."""
        self._kv = kv
        self._windows = tuple(dict.fromkeys(windows))
        self.layer_groups = tuple(
            tuple(layer for layer, each in enumerate(windows) if each == window)
            for window in self._windows
        )

    def turned(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotary(query, cos, sin)

    def read(self, layer: int, entry: ScheduledSequence) -> torch.Tensor:
        blocks = self._kv.keys[layer][entry.block_table]
        return blocks.flatten(0, 1)[: entry.end].transpose(0, 1).double()

    def runs(self, entry: ScheduledSequence) -> tuple[tuple[TierRun, ...], ...]:
        _, num_kv_heads, head_dim = self._kv.block_shape
        token_bytes = len(Part) * num_kv_heads * head_dim * self._kv.dtype.itemsize
        nums = [min(window or entry.end, entry.end) for window in self._windows]
        return tuple(
            (TierRun(EXACT, entry.end - num, entry.end, num * token_bytes),) for num in nums
        )


class TieredKeys:
    def __init__(self, kv: TieredKV) -> None:
        self.layer_groups = tuple(group.layers for group in kv.groups)
        self._kv = kv

    def turned(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotated(turned(query, cos, sin)).to(query.dtype)

    def read(self, layer: int, entry: ScheduledSequence) -> torch.Tensor:
        number = self._kv.group_of[layer]
        view = entry.spans[-1].views[number]
        slabs = torch.from_numpy(view.key_slabs).to(self._kv.device)
        formats = formats_of(self._kv.groups[number].config)
        return dequantised(self._kv.layers[layer], slabs, [*view.bounds], formats, is_keys=True)

    def runs(self, entry: ScheduledSequence) -> tuple[tuple[TierRun, ...], ...]:
        return tuple(
            self._runs(view.bounds, group.config.cold)
            for view, group in zip(entry.spans[-1].views, self._kv.groups, strict=True)
        )

    def _runs(self, bounds: Items[int], cold: BlockFormat) -> tuple[TierRun, ...]:
        bf16, int8 = (BlockFormat(each, each) for each in (Format.BF16, Format.INT8))
        starts = (0, *bounds[:-1])
        return tuple(
            TierRun(tier, start, end, self._num_bytes(end - start, stored_as))
            for tier, start, end, stored_as in zip(
                TIERS, starts, bounds, (bf16, cold, int8, bf16), strict=True
            )
        )

    def _num_bytes(self, num_tokens: int, stored_as: BlockFormat) -> int:
        """Of a block that is not full, as much as has tokens: only in bf16 there are such."""
        channels = self._kv.head_dim
        num_pairs = {Part.KEYS: channels, Part.VALUES: BLOCK_SIZE}
        head_bytes = 0
        for part, part_format in zip(Part, stored_as, strict=True):
            head_bytes += (num_tokens * channels * BF16_BYTES) >> part_format
            if part_format is not Format.BF16:
                head_bytes += num_tokens // BLOCK_SIZE * num_pairs[part] * AFFINE_BYTES
        return self._kv.num_kv_heads * head_bytes


def stored_keys(kv: KVTensors | TieredKV, windows: Items[int | None]) -> StoredKeys:
    """`windows` of the layers; a tiered cache has none."""
    return TieredKeys(kv) if isinstance(kv, TieredKV) else PagedKeys(kv, windows)
