"""Entry points of the op."""

import torch

from kernels.errors import ContractError
from kernels.kv_quantise.grains import by_grains
from kernels.launch import Launcher, cdiv, num_sms
from kernels.tiered_decode import reference
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.reference import Formats

NUM_SMS_WITHOUT_A_GPU = 2

_launch = Launcher(reference.CONTRACT, "kernels.tiered_decode.kernel:tiered_decode_kernel")
_launch_merge = Launcher(
    reference.MERGE_CONTRACT, "kernels.tiered_decode.kernel:tiered_decode_merge_kernel"
)


def num_runs_of(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    query_len: int = 1,
    size: int = reference.SERVED_SIZE,
) -> int:
    """Into how many runs a step's slabs are dealt: as many as have their programs run at once."""
    is_wide = size == reference.WIDE
    per_sm = reference.WIDE_PROGRAMS_PER_SM if is_wide else reference.PROGRAMS_PER_SM
    programs = num_kv_heads * reference.programs_of(num_heads // num_kv_heads, query_len, size)
    return max(1, num_sms(device, NUM_SMS_WITHOUT_A_GPU) * per_sm // programs)


def tiered_decode(
    query: torch.Tensor,
    slabs: Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    plan: torch.Tensor,
    formats: Formats,
    scale: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [num_sequences, num_heads, size] bfloat16, of 64, 128 or 256 channels, or ContractError
    -> attended, in `out_dtype` (that of the query, if None), and the logarithm of the sum of
    exponentials of each head's scores, [num_sequences, num_heads] fp32, by which results over parts
    of a context merge.

    Or query [num_sequences, query_len, num_heads, size], and results of such shapes: of each
    sequence its last query_len tokens, 1 to 4, each of which sees itself and what is before it; a
    query without a token, of a sequence of fewer, gives zeros and -inf. A KV head has at most 16
    queries, its heads times query_len, or ContractError. Where a sequence has blocks of a cold or
    warm tier, at least query_len - 1 tokens are hot.

    key_tables, value_tables [num_sequences, most slabs of a sequence] int32: the slabs of sink,
    cold, warm and hot tier, in this order. plan: of `tiered_plan` for the same formats. A sequence
    of no tokens gives zeros and -inf. Table entries past a sequence's slabs are not read, and what
    lies in its last slab past its last token may be anything. All that changes from step to step is
    read on the GPU: a captured graph stays right.

    The grain of each arena, 1 or 2, is its slabs by its slots of metadata.
    """
    size = query.shape[-1]
    if size not in reference.SIZES:
        expected = f"of heads of {' or '.join(map(str, reference.SIZES))}"
        raise ContractError("tiered_decode", "query", expected, f"{size}")
    queries = query if query.dim() == 4 else query.unsqueeze(1)
    arenas = _by_grains(slabs, formats)
    partial = _partial(queries, arenas, key_tables, value_tables, plan, formats, scale)
    out, lse = _merged(*partial, plan, len(query), out_dtype or query.dtype)
    return out.view(query.shape), lse.view(query.shape[:-1])


def _partial(
    queries: torch.Tensor,
    arenas: Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    plan: torch.Tensor,
    formats: Formats,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each record found: [num_records, query_len * num_heads, size], and the logarithms to
    base 2 of the sums. arenas: by grains."""
    num_sequences, query_len, num_heads, size = queries.shape
    num_kv_heads, num_records = arenas.key_meta.shape[1], len(plan)
    assert num_heads % num_kv_heads == 0, (queries.shape, arenas.key_meta.shape)
    grains = arenas.keys.shape[1], arenas.values.shape[1]
    meta = reference.meta_of(formats, grains, size, num_heads // num_kv_heads, query_len)
    partial = queries.new_empty(num_records, query_len * num_heads, size, dtype=torch.float32)
    partial_lse = partial.new_empty(partial.shape[:2])
    sizes = (
        num_sequences,
        num_heads,
        len(arenas.keys),
        len(arenas.values),
        num_kv_heads,
        key_tables.shape[1],
        value_tables.shape[1],
        num_records,
    )
    arguments = (queries, *arenas, key_tables, value_tables, plan, partial, partial_lse)
    sequence_stride, query_stride, head_stride, _ = queries.stride()
    scalars = sequence_stride, head_stride, *sizes, scale, query_stride
    grid = (num_kv_heads * meta["PROGRAMS"], num_records)
    _launch(grid, *arguments, *scalars, **meta)
    return partial, partial_lse


def _merged(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    plan: torch.Tensor,
    num_sequences: int,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_sequences, query_len * num_heads, size], and without the size."""
    num_records, num_queries, size = partial.shape
    out = partial.new_empty(num_sequences, num_queries, size, dtype=out_dtype)
    lse = partial.new_empty(num_sequences, num_queries)
    num_runs = num_records - num_sequences
    is_few = num_runs <= reference.FEW_SPLITS * num_sequences
    merge = reference.MERGE_META_OF_FEW if is_few else reference.MERGE_META_OF_MANY
    grid = (num_sequences * num_queries, cdiv(size, merge["COLUMNS"]))
    results = (partial, partial_lse, plan, out, lse)
    _launch_merge(grid, *results, num_records, num_sequences, num_queries, **merge, SIZE=size)
    return out, lse


def _by_grains(slabs: Slabs, formats: Formats) -> Slabs:
    keys, values, key_meta, value_meta = slabs
    return slabs._replace(
        keys=by_grains("tiered_decode", "key_meta", keys, key_meta, formats.key_bits),
        values=by_grains("tiered_decode", "value_meta", values, value_meta, formats.value_bits),
    )
