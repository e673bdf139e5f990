"""Entry points of the op: pack a weight once, multiply by it often."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from kernels.contract import Contract
from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.linear import reference
from kernels.silu_mul.api import silu_mul

KERNELS = "kernels.linear.kernel:{}_kernel"
EXACT_ROWS = 64  # up to which oneDNN is shown every number of rows
Meta = Mapping[str, int]


def _launcher(contract: Contract) -> Launcher:
    return Launcher(contract, KERNELS.format(contract.kernel))


_one_row = _launcher(reference.ONE_ROW_CONTRACT)
_one_row_silu_mul = _launcher(reference.ONE_ROW_SILU_CONTRACT)
_few_rows = _launcher(reference.FEW_ROWS_CONTRACT)
_few_rows_silu_mul = _launcher(reference.FEW_ROWS_SILU_CONTRACT)
_tiled = _launcher(reference.TILED_CONTRACT)


@dataclass(frozen=True, eq=False)
class Form:
    """A kernel in one of its forms, and the rows that it is meant for, at most.

    shared_bytes: what a program needs, where some GPUs have less.
    """

    launch: Launcher
    meta: Meta
    max_rows: int
    weights_per_output: int = 1
    shared_bytes: int = 0


LINEARS = (
    *(Form(_one_row, meta, 1) for meta in reference.ONE_ROW_METAS),
    *(Form(_few_rows, meta, meta["ROWS"]) for meta in reference.FEW_ROWS_METAS),
    *(
        Form(_tiled, meta, meta["ROWS"], shared_bytes=reference.TILED_SHARED_BYTES)
        for meta in reference.TILED_METAS
    ),
)
SILU_MULS = (
    *(Form(_one_row_silu_mul, meta, 1, 2) for meta in reference.ONE_ROW_SILU_METAS),
    *(Form(_few_rows_silu_mul, meta, meta["ROWS"], 2) for meta in reference.FEW_ROWS_SILU_METAS),
)
FIXED_ROWS = 8  # of a product on a CPU
FIXED = Form(_tiled, reference.FIXED_META, reference.MAX_ROWS)
FIXED_FLOAT32 = Form(_tiled, reference.FIXED_FLOAT32_META, reference.MAX_ROWS)


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Of one weight on a GPU: what multiplies by it fastest, by the number of rows rounded up to a
    power of 2; cuBLAS does where there is none.

    linears: of `linear`. silu_muls: of `linear_silu_mul`; else two operations.
    """

    linears: Mapping[int, Form] = field(default_factory=dict)
    silu_muls: Mapping[int, Form] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PackedLinear:
    """A weight [out_size, in_size] in the layout its device multiplies fastest, and its bias.

    Float32 on a CPU goes into oneDNN's own tiling: MKL's sgemm reads a plain matrix at less than
    half the speed (EPYC, 1 thread, 3072 x 576: 166 against 411 us at 1 row, 262 against 669 at 8,
    3.6 against 8.7 ms at 256).

    added: the bias, or zeros, for kernels that always add one. plan: what `choose_linears` found.
    out_dtype: of the products, where it is not that of their input: float32.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_packed: bool
    added: torch.Tensor
    plan: LinearPlan = LinearPlan()
    out_dtype: torch.dtype | None = None


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> PackedLinear:
    """`weight` is read, not kept, where packing copies it. out_dtype: float32, or that of what is
    multiplied (None)."""
    added = weight.new_zeros(len(weight)) if bias is None else bias
    is_float32_on_a_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if is_float32_on_a_cpu and not runs_kernels(weight) and _has_onednn():
        tiled = torch.ops.mkldnn._reorder_linear_weight(weight)
        return PackedLinear(tiled, bias, is_packed=True, added=added, out_dtype=out_dtype)
    return PackedLinear(weight, bias, is_packed=False, added=added, out_dtype=out_dtype)


def linear(x: torch.Tensor, packed: PackedLinear, *, deterministic: bool = False) -> torch.Tensor:
    """x [num_tokens, in_size] -> [num_tokens, out_size], of the weight's `out_dtype`.

    deterministic: bitwise batch invariant: a row's result does not depend on the other rows, nor on
    how many there are. Raises ContractError.
    """
    assert x.shape[-1] == packed.weight.shape[1], (x.shape, packed.weight.shape)
    if runs_kernels(x) and not packed.is_packed:
        if deterministic:
            return fixed(x, packed)
        form = packed.plan.linears.get(rounded_up(len(x)))
        if form is not None:
            return multiply(form, x, packed)
    elif deterministic and len(x):
        # Libraries choose by the number of rows how they sum: here it is always the same.
        padded = F.pad(x, (0, 0, 0, -len(x) % FIXED_ROWS))
        tiles = [_by_libraries(tile, packed) for tile in padded.split(FIXED_ROWS)]
        return torch.cat(tiles)[: len(x)]
    return _by_libraries(x, packed)


def linear_silu_mul(
    x: torch.Tensor, packed: PackedLinear, *, deterministic: bool = False
) -> torch.Tensor:
    """x [num_tokens, in_size], a weight [2 * size, in_size], gates first -> silu(gate) * up,
    [num_tokens, size]: `silu_mul` of `linear`, to the rounding. Raises ContractError."""
    if runs_kernels(x) and not deterministic:
        form = packed.plan.silu_muls.get(rounded_up(len(x)))
        if form is not None:
            return multiply(form, x, packed)
    return silu_mul(linear(x, packed, deterministic=deterministic))


def _by_libraries(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    if packed.is_packed:
        return _by_onednn(x, packed)
    return reference.linear(x, packed.weight, packed.bias, packed.out_dtype)


def _by_onednn(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """It keeps 0.65 MB for each shape of a weight and number of rows: of rows it is shown few."""
    num_rows = x.shape[0]
    num_padding = in_few_steps(num_rows) - num_rows if num_rows > EXACT_ROWS else 0
    if num_padding:
        x = F.pad(x, (0, 0, 0, num_padding))
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, packed.weight, packed.bias, "none", [], ""
    )
    return product[:num_rows] if num_padding else product


def in_few_steps(num_rows: int) -> int:
    """Rounded up, beyond EXACT_ROWS to 32 steps an octave: of 256 numbers 128 remain."""
    step = 1 << max(0, (num_rows - 1).bit_length() - EXACT_ROWS.bit_length() + 1)
    return cdiv(num_rows, step) * step


def rounded_up(num_rows: int) -> int:
    """To a power of 2; 0 stays 0."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


def fixed(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """`linear`, deterministic. Raises ContractError."""
    return multiply(FIXED_FLOAT32 if x.dtype == torch.float32 else FIXED, x, packed)


def multiply(form: Form, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """By a kernel in this form. Raises ContractError."""
    (num_rows, in_size), meta = x.shape, form.meta
    assert num_rows <= form.max_rows, (x.shape, form)
    out_size = len(packed.weight) // form.weights_per_output
    out = x.new_empty(num_rows, out_size, dtype=packed.out_dtype)
    tensors, programs = (x, packed.weight, packed.added, out), cdiv(out_size, meta["OUTPUTS"])
    if "ROWS" not in meta:
        form.launch((programs,), *tensors, out_size, in_size, **meta)
    else:
        sizes = (x.stride(0), num_rows, out_size, in_size)
        form.launch((cdiv(num_rows, meta["ROWS"]) * programs,), *tensors, *sizes, **meta)
    return out


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
