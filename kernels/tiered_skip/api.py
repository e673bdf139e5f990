"""Entry point of the op."""

from typing import NamedTuple

import torch

from kernels.kv_quantise.grains import by_grains
from kernels.launch import Launcher, cdiv
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.reference import Formats
from kernels.tiered_skip import reference

_launch = Launcher(reference.CONTRACT, "kernels.tiered_skip.kernel:tiered_skip_kernel")
_launch_again = Launcher(
    reference.AGAIN_CONTRACT, "kernels.tiered_skip.kernel:tiered_skip_again_kernel"
)
_launch_merge = Launcher(
    reference.MERGE_CONTRACT, "kernels.tiered_skip.kernel:tiered_skip_merge_kernel"
)


class Partial(NamedTuple):
    """What records find: results, and sums: of what they attended to, and of what they skipped."""

    results: torch.Tensor
    sums: torch.Tensor


def tiered_skip(
    query: torch.Tensor,
    slabs: Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    plan: torch.Tensor,
    formats: Formats,
    scale: float,
    skips: torch.Tensor,
    masses: torch.Tensor,
    left_out: torch.Tensor,
    reach: torch.Tensor,
    epsilon: float,
    out_dtype: torch.dtype | None = None,
    sums: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `tiered_decode` of one query a sequence and heads of 64 or 128, which leaves out the
    values of cold blocks: those of block j of sequence s for KV head h where skips[s, h, j] is not
    zero. Returns as it does, and third the logarithm of the sum of exponentials of what was left
    out, [num_sequences, num_heads] fp32, -inf where nothing was: at least that, so that at most
    sigmoid(third - second) of a head's softmax was, and its result is off by at most that times
    (length of the longest value left out + length of the result). Where that were more than
    epsilon for one query of a KV head, that head reads the heaviest of what it left out in a second
    launch, which else ends at once. Raises ContractError.

    skips [num_sequences, num_kv_heads, blocks] int32, of at least all cold blocks (of all but
    sink's and hot tier's where their values are of 8 bits). masses [num_sequences, num_kv_heads,
    blocks, num_heads / num_kv_heads] float32 takes what each cold block weighs, logarithms to base
    2 of sums of exponentials, as high as they can be: what `skip_list` chooses from. left_out, of
    the form of skips, takes zero for each block that was read after all. reach [num_sequences,
    num_kv_heads] float32: a bound for all keys of a sequence, of `rounding`. sums: where the second
    and the third of the results go.
    """
    most = reference.most_of(epsilon)
    slabs = _by_grains(slabs, formats)
    num_heads, num_kv_heads = query.shape[1], slabs.key_meta.shape[1]
    grains = slabs.keys.shape[1], slabs.values.shape[1]
    meta = reference.meta_of(formats, grains, query.shape[2], num_heads // num_kv_heads)
    read = (query, *slabs, key_tables, value_tables, plan, skips)
    scalars = *query.stride()[:2], *_counts(*read), scale
    grid = num_kv_heads, len(plan)

    partial = _scratch(query, len(plan))
    _launch(grid, *read, reach, masses, *partial, *scalars, **meta)
    again = _scratch(query, len(plan))
    state = masses, partial.sums, left_out
    again_meta = reference.again_meta_of(meta)
    _launch_again(grid, *read, *state, *again, *scalars, most, **again_meta)
    if sums is None:
        lse, skipped = (query.new_empty(query.shape[:2], dtype=torch.float32) for _ in "12")
        sums = lse, skipped
    out = query.new_empty(query.shape, dtype=out_dtype or query.dtype)
    _merge((*partial, *again), plan, out, *sums)
    return out, *sums


def _counts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_meta: torch.Tensor,
    value_meta: torch.Tensor,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    plan: torch.Tensor,
    skips: torch.Tensor,
) -> tuple[int, ...]:
    """In the order of the contract."""
    tables = key_tables.shape[1], value_tables.shape[1]
    slots = len(keys), len(values), key_meta.shape[1]
    return *query.shape[:2], *slots, *tables, len(plan), skips.shape[2]


def _scratch(query: torch.Tensor, num_records: int) -> Partial:
    num_heads, size = query.shape[1:]
    results = query.new_empty(num_records, num_heads, size, dtype=torch.float32)
    return Partial(results, results.new_empty(2, num_records, num_heads))


def _merge(
    found: tuple[torch.Tensor, ...],
    plan: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    skipped: torch.Tensor,
) -> None:
    num_sequences, num_heads, size = out.shape
    merge = reference.MERGE_META
    counts = len(plan), num_sequences, num_heads
    grid = (num_sequences * num_heads, cdiv(size, merge["COLUMNS"]))
    _launch_merge(grid, *found, plan, out, lse, skipped, *counts, **merge, SIZE=size)


def _by_grains(slabs: Slabs, formats: Formats) -> Slabs:
    keys, values, key_meta, value_meta = slabs
    return slabs._replace(
        keys=by_grains("tiered_skip", "key_meta", keys, key_meta, formats.key_bits),
        values=by_grains("tiered_skip", "value_meta", values, value_meta, formats.value_bits),
    )
