"""Entry points of the op."""

import torch

from kernels.errors import ContractError
from kernels.launch import Launcher, cdiv, num_sms, runs_kernels
from kernels.metas import Meta, narrowest
from kernels.paged_decode import reference
from kernels.paged_decode.splits import Splits, fitting_splits, fixed_splits

NUM_SMS_WITHOUT_A_GPU = 40

_launch = Launcher(reference.CONTRACT, "kernels.paged_decode.kernel:paged_decode_kernel")
_launch_merge = Launcher(
    reference.MERGE_CONTRACT, "kernels.paged_decode.kernel:paged_decode_merge_kernel"
)


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    *,
    max_context_len: int | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """As `paged_decode_lse`, without the second result."""
    return paged_decode_lse(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        scale,
        window,
        max_context_len=max_context_len,
        deterministic=deterministic,
    )[0]


def paged_decode_lse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    *,
    max_context_len: int | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [num_sequences, num_heads, head_dim] -> like query, and the logarithm of the sum of
    exponentials of each head's scores, [num_sequences, num_heads] fp32, by which results over
    parts of a context merge.

    caches [num_blocks, block_size, num_kv_heads, head_dim]; block_tables [num_sequences,
    max_num_blocks] and context_lens [num_sequences], both int64 as the engine holds them: 8 bytes
    a block of some 256 KiB. A context of 0 (padding up to the size of a CUDA graph) gives zeros
    and -inf. Table entries past a context are not read, nor are tokens that the query does not
    see: either may be anything.

    window: the last tokens of the context that the query sees; None for all. max_context_len: no
    context is longer; by default what a table holds. deterministic: bitwise batch invariant.
    On a GPU head_dim is a multiple of 16 up to 256, and block_size one of 32, or ContractError.
    """
    num_sequences, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert head_dim == key_cache.shape[3], (query.shape, key_cache.shape)
    assert num_heads % num_kv_heads == 0, (query.shape, key_cache.shape)
    assert block_tables.shape[0] == num_sequences, (query.shape, block_tables.shape)
    assert context_lens.shape == (num_sequences,), (query.shape, context_lens.shape)
    assert window is None or window > 0, window
    caches = (key_cache, value_cache, block_tables, context_lens)
    if not runs_kernels(query):
        return reference.paged_decode_lse(query, *caches, scale, window)
    max_tokens = block_tables.shape[1] * block_size
    if max_context_len is not None:
        max_tokens = min(max_tokens, max_context_len)
    return _attend(query, *caches, scale, window, max_tokens, deterministic)


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    max_tokens: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_sequences, heads, head_dim = query.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    tensors = (query, key_cache, value_cache, block_tables, context_lens)
    sizes = (heads, num_blocks, block_size, kv_heads, block_tables.shape[1], head_dim)
    steps = (*query.stride()[:2], *sizes)
    meta = _meta(query.dtype, block_size, steps)
    grid_rows = kv_heads * cdiv(heads // kv_heads, reference.ROWS)
    seen = max_tokens if window is None else min(max_tokens, window + meta["TILE"])
    splits = _splits(query.device, seen, meta, num_sequences * grid_rows, deterministic)
    cut = (window or reference.ALL_TOKENS, splits.most, splits.min_tiles)

    partial = query.new_empty(num_sequences, heads, splits.count, head_dim, dtype=torch.float32)
    partial_lse = partial.new_empty(partial.shape[:3])
    results = query.new_empty(query.shape), partial.new_empty(query.shape[:2])
    grid = (grid_rows, splits.count, num_sequences)
    arguments = (*tensors, partial, partial_lse, *results, *steps, splits.count, scale, *cut)
    _launch(grid, *arguments, **reference.launched(meta))
    if splits.count > 1:
        # By `most`, which of fixed splits is a constant: the order of a sum is part of its bits.
        is_few = splits.most <= reference.FEW_SPLITS
        merge = reference.MERGE_META_OF_FEW if is_few else reference.MERGE_META_OF_MANY
        grid = (num_sequences * heads, cdiv(head_dim, merge["COLUMNS"]), 1)
        found = (partial, partial_lse, context_lens, *results)
        _launch_merge(grid, *found, heads, splits.count, head_dim, meta["TILE"], *cut, **merge)
    return results


def _meta(dtype: torch.dtype, block_size: int, steps: tuple[int, ...]) -> Meta:
    """Raises ContractError."""
    contract = reference.CONTRACT
    arguments = (*[None] * len(contract.tensors), *steps)
    if not contract.is_aligned(arguments):
        expected = "of heads whose size and strides are multiples of 16 elements"
        came = ", ".join(
            f"{name} = {arguments[contract.names.index(name)]}" for name in contract.steps
        )
        raise ContractError(contract.kernel, "query", expected, came)
    metas = reference.FP32_METAS if dtype == torch.float32 else reference.METAS
    meta = narrowest(contract, metas, "BLOCK", "size", arguments)
    if block_size % meta["TILE"]:
        expected = f"of blocks of a multiple of {meta['TILE']} tokens"
        raise ContractError(contract.kernel, "key_cache", expected, f"blocks of {block_size}")
    return meta


def _splits(
    device: torch.device, max_tokens: int, meta: Meta, num_rows: int, deterministic: bool
) -> Splits:
    if deterministic:
        return fixed_splits(max_tokens, meta["TILE"])
    max_programs = num_sms(device, NUM_SMS_WITHOUT_A_GPU) * meta["programs_per_sm"]
    return fitting_splits(max_tokens, meta["TILE"], num_rows, max_programs)
