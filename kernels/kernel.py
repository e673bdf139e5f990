"""`@kernel`: a Triton function with its contract and the variants that are compiled ahead of time.

    @kernel(contract=CONTRACT, variants=variants({"gate_up": FLOATS}, [{"BLOCK": 1024}]))
    def silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, size, BLOCK: tl.constexpr): ...

The parameters are the contract's arguments in its order (of a tensor `x`: `x_ptr`), then the
constexprs. The decorator adds nothing to the function: what is compiled is what `triton.jit` alone
would compile. Just in time too it depends on none but the scalars that addresses are multiples of.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.contract import Contract, Scalar
from kernels.dependent_launch import FIRST_ARCH, wait_for_earlier_kernels

LAUNCH_OPTIONS = ("num_warps", "num_stages")
# Off, as it is in the interpreter and the references: a multiply and an add round twice everywhere.
FP_FUSION = False
# Of the models that are served; what is of others is compiled when it comes.
SERVED = (torch.bfloat16,)
TRITON_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel.

    dtypes: of its tensors, in the contract's order.
    meta: constexprs and launch options, sorted by name.
    is_aligned: 16 divides every size and stride (`Contract.steps`): rows are read 16 bytes at once.
    """

    dtypes: tuple[torch.dtype, ...]
    meta: tuple[tuple[str, int], ...]
    is_aligned: bool


Variants = Callable[[Contract], list[Variant]]


def variants(
    dtypes: Mapping[str, Sequence[torch.dtype]],
    metas: Sequence[Mapping[str, int]],
    aligned: Sequence[bool] = (True, False),
    unaligned_metas: Sequence[Mapping[str, int]] | None = None,
) -> Variants:
    """All combinations. `dtypes` names the tensors that may have several; the others have the one
    their contract gives them, or that of the tensor they are `like`. unaligned_metas: of the
    launches that are not aligned, where those have other metas."""
    others = metas if unaligned_metas is None else unaligned_metas
    forms = [(meta, each) for each in aligned for meta in (metas if each else others)]

    def of(contract: Contract) -> list[Variant]:
        chosen = [
            dict(zip(dtypes, each, strict=True)) for each in itertools.product(*dtypes.values())
        ]
        return [
            Variant(dtypes_of(contract, choice), tuple(sorted(meta.items())), is_aligned)
            for choice, (meta, is_aligned) in itertools.product(chosen, forms)
        ]

    return of


def dtypes_of(contract: Contract, chosen: Mapping[str, torch.dtype]) -> tuple[torch.dtype, ...]:
    found: dict[str, torch.dtype] = {}
    for name, tensor in contract.tensors.items():
        if name in chosen:
            found[name] = chosen[name]
        elif tensor.like is not None:
            found[name] = found[tensor.like]
        elif len(tensor.dtypes) == 1:
            (found[name],) = tensor.dtypes
        else:
            raise TypeError(f"{contract.kernel}: the variants do not say the dtype of {name}")
    return tuple(found.values())


class Kernel:
    """A declared kernel. `jit` is what `triton.jit` made of the function. `waits`: for the kernels
    before it, itself (`kernels.dependent_launch`)."""

    def __init__(self, contract: Contract, function: Callable[..., None], of: Variants) -> None:
        self.contract = contract
        self.function = function
        others = [name for name in contract.scalars if name not in contract.steps]
        self.jit: Any = triton.jit(function, do_not_specialize=others)
        self.variants = of(contract)
        self.waits = wait_for_earlier_kernels.__name__ in function.__code__.co_names
        names = list(inspect.signature(function).parameters)
        expected = [f"{name}_ptr" for name in contract.tensors] + list(contract.scalars)
        if names[: len(expected)] != expected:
            raise TypeError(f"{contract.kernel}: its parameters must begin with {expected}")
        self.constexprs = names[len(expected) :]

    @property
    def name(self) -> str:
        return self.contract.kernel

    def launch(
        self, grid: tuple[int, ...], arguments: Sequence[Any], meta: Mapping[str, int]
    ) -> None:
        """Compiled just in time, on the current stream."""
        options = {"enable_fp_fusion": FP_FUSION}
        if self.waits and arguments[0].is_cuda:
            major, _ = torch.cuda.get_device_capability(arguments[0].device)
            options["launch_pdl"] = 10 * major >= FIRST_ARCH
        self.jit[grid](*arguments, **meta, **options)

    def signature(self, variant: Variant) -> dict[str, str]:
        """Triton's types of the parameters, by name."""
        types = {
            f"{name}_ptr": f"*{TRITON_TYPES[dtype]}"
            for name, dtype in zip(self.contract.tensors, variant.dtypes, strict=True)
        }
        for name, scalar in self.contract.scalars.items():
            is_float = isinstance(scalar, Scalar) and scalar.kind is float
            types[name] = "fp32" if is_float else "i32"
        return types | dict.fromkeys(self.constexprs, "constexpr")


def kernel(*, contract: Contract, variants: Variants) -> Callable[[Callable[..., None]], Kernel]:
    return lambda function: Kernel(contract, function, variants)
