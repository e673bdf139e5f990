"""Entry point of the op."""

import torch

from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.metas import narrowest
from kernels.rms_norm import reference

_launch = Launcher(reference.CONTRACT, "kernels.rms_norm.kernel:rms_norm_kernel")
_launch_residual = Launcher(
    reference.RESIDUAL_CONTRACT, "kernels.rms_norm.kernel:rms_norm_residual_kernel"
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., size], weight [size] -> [..., size] in x's dtype; size <= 16384 on a GPU.

    residual [..., size] float32: becomes residual + x in place, and its norm is the result. Bitwise
    batch invariant: a row's result does not depend on the other rows, nor on how many there are.
    """
    assert x.shape[-1:] == weight.shape, (x.shape, weight.shape)
    assert residual is None or residual.shape == x.shape, (x.shape, residual.shape)
    if not runs_kernels(x):
        return reference.rms_norm(x, weight, eps, residual)
    out = x.new_empty(x.shape)
    if residual is None:
        _norm(_three_dimensional(x), weight, _three_dimensional(out), eps)
    else:
        _add_and_norm(x, residual, weight, out, eps)
    return out


def _norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    tokens, heads, size = x.shape
    arguments = (x, weight, out, x.stride(0), x.stride(1), tokens, heads, size, eps)
    meta = narrowest(reference.CONTRACT, reference.METAS, "BLOCK", "size", arguments)
    _launch((cdiv(tokens * heads, meta["ROWS"]),), *arguments, **meta)


def _add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    size = x.shape[-1]
    x, residual, out = (each.view(-1, size) for each in (x, residual, out))
    arguments = (x, residual, weight, out, x.stride(0), residual.stride(0), size, eps)
    contract, metas = reference.RESIDUAL_CONTRACT, reference.RESIDUAL_METAS
    meta = narrowest(contract, metas, "BLOCK", "size", arguments)
    _launch_residual((len(x),), *arguments, **meta)


def _three_dimensional(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size]; a view wherever the strides allow one."""
    if x.dim() == 3:
        return x
    return x[None, None] if x.dim() == 1 else x.flatten(0, -2)[:, None]
