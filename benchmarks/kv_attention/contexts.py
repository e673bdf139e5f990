"""Sequences of random slabs, scattered over arenas so large that no two calls meet in the L2."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import torch

from kernels.kv_quantise.grains import grain_of
from kernels.kv_quantise.layout import BLOCK_TOKENS, slabs_of_block
from kernels.launch import cdiv
from kernels.tiered_decode.api import num_runs_of
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import TOKEN_BITS, WARM_BITS, Formats

NUM_HEADS, NUM_KV_HEADS, SIZE = 32, 8, 128
SINK_TOKENS, HOT_TOKENS, WARM_TOKENS = 64, 128, 512
PART_BYTES = 32 * SIZE
META_SIZES = (SIZE, BLOCK_TOKENS)  # of a slot of keys, and of values
# Codes are spread evenly: keys and values of unit size.
STEP = {4: 0.217, 8: 0.01353}


@dataclass(frozen=True)
class Contexts:
    """Of one batch. key_ids, value_ids: the slabs that its tables name."""

    slabs: Slabs
    key_tables: torch.Tensor
    value_tables: torch.Tensor
    bounds: torch.Tensor
    formats: Formats
    plan: torch.Tensor

    def arguments(self) -> tuple[object, ...]:
        tables = self.key_tables, self.value_tables
        return self.slabs, *tables, self.plan, self.formats, SIZE**-0.5


def cold_bounds(lengths: Sequence[int]) -> torch.Tensor:
    """Everything in the cold format."""
    return torch.tensor([[0, length, length, length] for length in lengths], dtype=torch.int32)


def tiered_bounds(lengths: Sequence[int]) -> torch.Tensor:
    bounds = []
    for length in lengths:
        hot = max(0, length - HOT_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
        sink = min(SINK_TOKENS, hot)
        bounds.append([sink, max(sink, hot - WARM_TOKENS), hot, length])
    return torch.tensor(bounds, dtype=torch.int32)


def sets_of(
    bounds: torch.Tensor, formats: Formats, min_bytes: int, sharpness: float = 1.0
) -> list[Contexts]:
    """As many batches as take `min_bytes` together. sharpness: of keys' scales."""
    halves = [
        [_slabs_of(row, bits) for row in bounds.tolist()]
        for bits in (formats.key_bits, formats.value_bits)
    ]
    grains = [slabs_of_block(bits) for bits in formats]
    num_slabs = [sum(map(len, half)) for half in halves]
    num_slots = [num // grain for num, grain in zip(num_slabs, grains, strict=True)]
    slot_bytes = [
        NUM_KV_HEADS * (grain * PART_BYTES + 2 * size * torch.float16.itemsize)
        for grain, size in zip(grains, META_SIZES, strict=True)
    ]
    num_sets = cdiv(min_bytes, sum(map(mul, num_slots, slot_bytes)))
    arenas = [
        _arena(num_sets * num, grain, size)
        for num, grain, size in zip(num_slots, grains, META_SIZES, strict=True)
    ]
    orders = [
        _scattered(num_sets * num, grain) for num, grain in zip(num_slots, grains, strict=True)
    ]
    sets = []
    device = torch.device("cuda", 0)
    num_runs = num_runs_of(device, NUM_HEADS, NUM_KV_HEADS)
    for index in range(num_sets):
        tables = [
            _table(half, order[index * num : (index + 1) * num], *arena, step)
            for half, order, num, arena, step in zip(
                halves, orders, num_slabs, arenas, (sharpness, 1.0), strict=True
            )
        ]
        (keys, key_meta), (values, value_meta) = arenas
        slabs = Slabs(keys, values, key_meta, value_meta)
        on_gpu = bounds.cuda()
        plan = tiered_plan(on_gpu, num_runs, formats)
        sets.append(Contexts(slabs, *tables, on_gpu, formats, plan))
    return sets


def _slabs_of(bounds: Sequence[int], bits: int) -> list[int]:
    """The bits of each slab of a sequence, whole blocks."""
    sink, cold, warm, length = bounds
    runs = ((sink, TOKEN_BITS), (cold - sink, bits), (warm - cold, WARM_BITS))
    found = []
    for num_tokens, each_bits in (*runs, (length - warm, TOKEN_BITS)):
        found += [each_bits] * (cdiv(num_tokens, BLOCK_TOKENS) * slabs_of_block(each_bits))
    return found


def _arena(num_slots: int, grain: int, meta_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_slots * grain, NUM_KV_HEADS, PART_BYTES)
    slabs = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
    meta = torch.empty(num_slots, NUM_KV_HEADS, 2, meta_size, dtype=torch.float16, device="cuda")
    return slabs, meta


def _scattered(num_slots: int, grain: int) -> torch.Tensor:
    """Slabs, by whole grains."""
    slots = torch.randperm(num_slots, device="cuda")
    return (slots[:, None] * grain + torch.arange(grain, device="cuda")).flatten()


def _table(
    sequences: Sequence[Sequence[int]],
    ids: torch.Tensor,
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sharpness: float,
) -> torch.Tensor:
    bits = torch.tensor([each for slabs in sequences for each in slabs], device="cuda")
    grain, is_keys = grain_of(slabs, meta), meta.shape[3] == SIZE
    for each in (4, 8):
        slots = ids[bits == each].view(-1, slabs_of_block(each))[:, ::grain] // grain
        of_block = 1 if is_keys else slots.shape[1]  # keys have the same in all slots of a block
        scales = torch.empty(len(slots), of_block, NUM_KV_HEADS, meta.shape[3], device="cuda")
        scales.uniform_(0.5, 1.5).mul_(STEP[each] * sharpness)
        zeros = torch.empty_like(scales).uniform_(-0.5, 1.5)
        if each == 4 and is_keys:  # high nibbles, as slabs have them
            is_high = torch.arange(SIZE, device="cuda") >= SIZE // 2
            scales, zeros = scales / (1 + 15 * is_high), zeros * (1 + 15 * is_high)
        meta[slots] = torch.stack((scales, zeros), 3).half()
    chosen = ids[bits == TOKEN_BITS]
    tokens = torch.randn(len(chosen), NUM_KV_HEADS, 16 * SIZE, device="cuda") * sharpness
    slabs[chosen] = tokens.bfloat16().view(torch.uint8)
    widest = max(map(len, sequences))
    table = torch.zeros(len(sequences), widest, dtype=torch.int32, device="cuda")
    starts = 0
    for row, each in zip(table, sequences, strict=True):
        row[: len(each)] = ids[starts : starts + len(each)]
        starts += len(each)
    return table
