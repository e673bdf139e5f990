"""Bound by the reading of the weights: a program makes a few outputs, and has many bytes under way.

One row is multiplied in float32, where the tensor cores would have to wait for more. Else the
weights are the left operand of the tensor cores, for of them there are always many, and the rows of
x are its columns. All sums are of fixed order.
"""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, kernel, variants
from kernels.linear.reference import (
    FEW_ROWS_CONTRACT,
    FEW_ROWS_METAS,
    FEW_ROWS_SILU_CONTRACT,
    FEW_ROWS_SILU_METAS,
    FIXED_META,
    ONE_ROW_CONTRACT,
    ONE_ROW_METAS,
    ONE_ROW_SILU_CONTRACT,
    ONE_ROW_SILU_METAS,
    TILED_CONTRACT,
    TILED_METAS,
)
from kernels.prefetch import LINE_BYTES, prefetch_lines


def forms(metas):
    """Of the models that are served; another one is compiled when it is asked for."""
    return variants({"x": SERVED}, metas, aligned=(True,))


def linear_forms(metas):
    """Of layers, and of an output matrix, whose products stay float32."""
    dtypes = {"x": SERVED, "out": (*SERVED, torch.float32)}
    return variants(dtypes, metas, aligned=(True,))


@triton.jit
def load_tile(pointers, is_output, column, end):
    """Of weights, [OUTPUTS, TILE]."""
    return tl.load(pointers, mask=is_output[:, None] & (column < end), other=0.0)


@triton.jit
def load_parts(pointers, is_output, column, end):
    """Of weights, [PARTS, OUTPUTS, TILE]."""
    mask = is_output[None, :, None] & (column < end)[:, None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def prefetch_weights(weight_ptr, output, out_size, in_size, COLUMNS: tl.constexpr):
    """The first COLUMNS of those rows, of 16 bits: nothing that is stored meanwhile."""
    LINE: tl.constexpr = LINE_BYTES // 2
    LINES: tl.constexpr = (COLUMNS + LINE - 1) // LINE
    lines = tl.minimum(tl.arange(0, LINES) * LINE, in_size - 1)
    rows = tl.minimum(output, out_size - 1) * in_size
    prefetch_lines(weight_ptr + rows[:, None] + lines[None, :])


@triton.jit
def added(sums, bias_ptr, output, is_output):
    """The bias of each output, [OUTPUTS], onto sums [OUTPUTS, rows]."""
    bias = tl.load(bias_ptr + output, mask=is_output, other=0.0)
    return sums + bias.to(tl.float32)[:, None]


@triton.jit
def activated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32, each rounded to the dtype as if it had been stored."""
    gate = gate.to(dtype).to(tl.float32)
    rounded = (gate / (1 + tl.exp(-gate))).to(dtype)
    return (rounded.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)


@kernel(contract=ONE_ROW_CONTRACT, variants=linear_forms(ONE_ROW_METAS))
def linear_one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    out_size,
    in_size,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    prefetch_weights(weight_ptr, output, out_size, in_size, 2 * TILE)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    is_output = output < out_size
    column = tl.arange(0, TILE)[None, :]
    weights = weight_ptr + (output * in_size)[:, None] + column
    sums = tl.zeros([OUTPUTS, TILE], tl.float32)
    for start in tl.range(0, in_size, TILE, num_stages=STAGES):
        weight = load_tile(weights + start, is_output, column, in_size - start)
        x = tl.load(x_ptr + start + column, mask=column < in_size - start, other=0.0)
        sums = tl.fma(weight.to(tl.float32), tl.broadcast_to(x.to(tl.float32), sums.shape), sums)
    out = added(tl.sum(sums, axis=1, keep_dims=True), bias_ptr, output, is_output)
    tl.store(out_ptr + output[:, None], out.to(out_ptr.dtype.element_ty), mask=is_output[:, None])


@kernel(contract=ONE_ROW_SILU_CONTRACT, variants=forms(ONE_ROW_SILU_METAS))
def linear_silu_mul_one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    size,
    in_size,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    prefetch_weights(weight_ptr, output, 2 * size, in_size, TILE)
    prefetch_weights(weight_ptr, output + size, 2 * size, in_size, TILE)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    is_output = output < size
    column = tl.arange(0, TILE)[None, :]
    gates = weight_ptr + (output * in_size)[:, None] + column
    ups = weight_ptr + ((output + size) * in_size)[:, None] + column
    gate_sums = tl.zeros([OUTPUTS, TILE], tl.float32)
    up_sums = tl.zeros([OUTPUTS, TILE], tl.float32)
    for start in tl.range(0, in_size, TILE, num_stages=STAGES):
        gate = load_tile(gates + start, is_output, column, in_size - start)
        up = load_tile(ups + start, is_output, column, in_size - start)
        x = tl.load(x_ptr + start + column, mask=column < in_size - start, other=0.0)
        x = tl.broadcast_to(x.to(tl.float32), gate_sums.shape)
        gate_sums = tl.fma(gate.to(tl.float32), x, gate_sums)
        up_sums = tl.fma(up.to(tl.float32), x, up_sums)
    gate = added(tl.sum(gate_sums, axis=1, keep_dims=True), bias_ptr, output, is_output)
    up = added(tl.sum(up_sums, axis=1, keep_dims=True), bias_ptr + size, output, is_output)
    out = activated(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + output[:, None], out, mask=is_output[:, None])


@kernel(contract=FEW_ROWS_CONTRACT, variants=linear_forms(FEW_ROWS_METAS))
def linear_few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    rows,
    out_size,
    in_size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    prefetch_weights(weight_ptr, output, out_size, in_size, PARTS * TILE)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    row = tl.arange(0, ROWS)
    is_output, is_row = output < out_size, row < rows
    column = tl.arange(0, PARTS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    weights = weight_ptr + (output * in_size)[None, :, None] + column[:, None, :]
    xs = x_ptr + (row.to(tl.int64) * x_stride)[None, None, :] + column[:, :, None]
    sums = tl.zeros([PARTS, OUTPUTS, ROWS], tl.float32)
    for start in range(0, in_size, PARTS * TILE):
        weight = load_parts(weights + start, is_output, column, in_size - start)
        mask = is_row[None, None, :] & (column < in_size - start)[:, :, None]
        x = tl.load(xs + start, mask=mask, other=0.0)
        sums = tl.dot(weight, x, sums)
    out = added(tl.sum(sums, axis=0), bias_ptr, output, is_output)
    stored = out_ptr + (row.to(tl.int64) * out_size)[None, :] + output[:, None]
    mask = is_output[:, None] & is_row[None, :]
    tl.store(stored, out.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(contract=FEW_ROWS_SILU_CONTRACT, variants=forms(FEW_ROWS_SILU_METAS))
def linear_silu_mul_few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    rows,
    size,
    in_size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    prefetch_weights(weight_ptr, output, 2 * size, in_size, PARTS * TILE)
    prefetch_weights(weight_ptr, output + size, 2 * size, in_size, PARTS * TILE)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    row = tl.arange(0, ROWS)
    is_output, is_row = output < size, row < rows
    column = tl.arange(0, PARTS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    gates = weight_ptr + (output * in_size)[None, :, None] + column[:, None, :]
    ups = weight_ptr + ((output + size) * in_size)[None, :, None] + column[:, None, :]
    xs = x_ptr + (row.to(tl.int64) * x_stride)[None, None, :] + column[:, :, None]
    gate_sums = tl.zeros([PARTS, OUTPUTS, ROWS], tl.float32)
    up_sums = tl.zeros([PARTS, OUTPUTS, ROWS], tl.float32)
    for start in range(0, in_size, PARTS * TILE):
        gate = load_parts(gates + start, is_output, column, in_size - start)
        up = load_parts(ups + start, is_output, column, in_size - start)
        mask = is_row[None, None, :] & (column < in_size - start)[:, :, None]
        x = tl.load(xs + start, mask=mask, other=0.0)
        gate_sums = tl.dot(gate, x, gate_sums)
        up_sums = tl.dot(up, x, up_sums)
    gate = added(tl.sum(gate_sums, axis=0), bias_ptr, output, is_output)
    up = added(tl.sum(up_sums, axis=0), bias_ptr + size, output, is_output)
    out = activated(gate, up, out_ptr.dtype.element_ty)
    stored = out_ptr + (row.to(tl.int64) * size)[None, :] + output[:, None]
    tl.store(stored, out, mask=is_output[:, None] & is_row[None, :])


@kernel(contract=TILED_CONTRACT, variants=linear_forms([*TILED_METAS, FIXED_META]))
def linear_tiled_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    rows,
    out_size,
    in_size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    # Programs that run together read the same weights: those of all rows follow each other.
    tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = (tl.program_id(0) // tiles).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    prefetch_weights(weight_ptr, output, out_size, in_size, TILE)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    is_row, is_output = row < rows, output < out_size
    column = tl.arange(0, TILE)
    weights = weight_ptr + (output * in_size)[:, None] + column[None, :]
    xs = x_ptr + (row * x_stride)[None, :] + column[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, in_size, TILE):
        weight = load_tile(weights + start, is_output, column[None, :], in_size - start)
        mask = is_row[None, :] & (column < in_size - start)[:, None]
        x = tl.load(xs + start, mask=mask, other=0.0)
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    out = added(sums, bias_ptr, output, is_output).to(out_ptr.dtype.element_ty)
    stored = out_ptr + (row * out_size)[None, :] + output[:, None]
    tl.store(stored, out, mask=is_output[:, None] & is_row[None, :])
