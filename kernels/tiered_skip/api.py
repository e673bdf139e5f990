"""Entry point of the op."""

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
    num_kv_heads] float32: a bound for all keys of a sequence, of `rounding`.
    """
    num_sequences, num_heads, size = query.shape
    num_kv_heads, num_records = slabs.key_meta.shape[1], len(plan)
    most = reference.most_of(epsilon)
    slabs = slabs._replace(
        keys=by_grains("tiered_skip", "key_meta", slabs.keys, slabs.key_meta, formats.key_bits),
        values=by_grains(
            "tiered_skip", "value_meta", slabs.values, slabs.value_meta, formats.value_bits
        ),
    )
    grains = slabs.keys.shape[1], slabs.values.shape[1]
    meta = reference.meta_of(formats, grains, size, num_heads // num_kv_heads)
    shape = num_records, num_heads, size
    partial, again = (query.new_empty(shape, dtype=torch.float32) for _ in "12")
    partial_lse, partial_skipped, again_lse, again_skipped = (
        partial.new_empty(shape[:2]) for _ in "1234"
    )
    read = (query, *slabs, key_tables, value_tables, plan, skips)
    sizes = (
        num_sequences,
        num_heads,
        len(slabs.keys),
        len(slabs.values),
        num_kv_heads,
        key_tables.shape[1],
        value_tables.shape[1],
        num_records,
        skips.shape[2],
    )
    scalars = *query.stride()[:2], *sizes, scale
    grid = (num_kv_heads, num_records)
    _launch(grid, *read, reach, masses, partial, partial_lse, partial_skipped, *scalars, **meta)
    found, again_found = (partial_lse, partial_skipped), (again, again_lse, again_skipped)
    again_meta = reference.again_meta_of(meta)
    _launch_again(grid, *read, masses, *found, left_out, *again_found, *scalars, most, **again_meta)

    out = query.new_empty(query.shape, dtype=out_dtype or query.dtype)
    lse, skipped = (partial.new_empty(num_sequences, num_heads) for _ in "12")
    merge = reference.MERGE_META
    results = partial, partial_lse, *again_found, plan, out, lse, skipped
    counts = num_records, num_sequences, num_heads
    merge_grid = (num_sequences * num_heads, cdiv(size, merge["COLUMNS"]))
    _launch_merge(merge_grid, *results, *counts, **merge, SIZE=size)
    return out, lse, skipped
