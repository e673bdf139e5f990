"""One variant of one kernel, compiled for one architecture; no GPU is needed."""

import inspect
import re
from dataclasses import dataclass
from functools import cache

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from kernels.bundle.write import Code
from kernels.dependent_launch import FIRST_ARCH
from kernels.errors import BundleError
from kernels.kernel import FP_FUSION, LAUNCH_OPTIONS, Kernel, Variant
from kernels.registry import all_kernels

WARP_SIZE = 32
KEPT = (".json", ".ptx", ".cubin")


@dataclass(frozen=True, slots=True)
class Task:
    kernel: str
    variant: Variant
    arch: int


class CodeCache(FileCacheManager):  # type: ignore[misc]
    """Triton's, without the texts of what comes before PTX: to print them takes long."""

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary) if filename.endswith(KEPT) else ""
        return path

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Triton goes on with `group`, and reads all that it names."""
        for name in [name for name in group if not name.endswith(KEPT)]:
            del group[name]
        path: str = super().put_group(filename, group)
        return path


def compiled(task: Task) -> Code:
    """Raises BundleError."""
    return compile_variant(all_kernels()[task.kernel], task.variant, task.arch)


def compile_variant(kernel: Kernel, variant: Variant, arch: int) -> Code:
    """Raises BundleError."""
    if not isinstance(kernel.jit, JITFunction):
        raise BundleError(
            f"{kernel.name}: expected a kernel to compile, came one to interpret, for Triton was "
            "imported with TRITON_INTERPRET=1; unset it"
        )
    what = f"{kernel.name} for sm_{arch}, {_words(variant)}"
    constants, hints = _constants(kernel, variant), _hints(kernel, variant)
    source = ASTSource(kernel.jit, kernel.signature(variant), constants, hints)
    try:
        with knobs.cache.scope():
            knobs.cache.manager_class = CodeCache
            built = triton.compile(source, target=_target(arch), options=_options(variant))
    except Exception as exc:
        raise BundleError(f"{what}: Triton does not compile it: {exc}") from exc
    metadata = built.metadata
    scratch = metadata.global_scratch_size, metadata.profile_scratch_size
    if any(scratch):
        # A launch from a bundle passes null for both.
        raise BundleError(
            f"{what}: expected code without scratch memory, came one that needs {scratch[0]} "
            f"bytes, and {scratch[1]} to profile"
        )
    ptx = built.asm["ptx"]
    return Code(
        cubin=built.asm["cubin"],
        ptx=ptx.encode(),
        is_exact=re.search(r"^\.target sm_\d+[af]", ptx, re.MULTILINE) is not None,
        waits=kernel.waits and arch >= FIRST_ARCH,
        symbol=metadata.name,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
    )


@cache
def _target(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, WARP_SIZE)


def _constants(kernel: Kernel, variant: Variant) -> dict[str, object]:
    meta = dict(variant.meta)
    parameters = inspect.signature(kernel.function).parameters
    constants = {name: meta.get(name, parameters[name].default) for name in kernel.constexprs}
    unset = [name for name, value in constants.items() if value is inspect.Parameter.empty]
    unknown = meta.keys() - constants.keys() - set(LAUNCH_OPTIONS)
    if unset or unknown:
        raise BundleError(
            f"{kernel.name}: expected variants to set {' '.join(kernel.constexprs)} and launch "
            f"options, came {_words(variant)}: {' '.join([*unset, *sorted(unknown)])}"
        )
    return constants


def _hints(kernel: Kernel, variant: Variant) -> dict[tuple[int, ...], list[list[object]]]:
    """What the contract, or the choice of the aligned variant, promises 16 to divide."""
    contract = kernel.contract
    divisible = {
        f"{name}_ptr" for name, tensor in contract.tensors.items() if not tensor.align % 16
    }
    if variant.is_aligned:
        divisible |= set(contract.steps)
    names = enumerate(kernel.signature(variant))
    return {(index,): [["tt.divisibility", 16]] for index, name in names if name in divisible}


def _options(variant: Variant) -> dict[str, object]:
    meta = dict(variant.meta)
    launch = {name: meta[name] for name in LAUNCH_OPTIONS if name in meta}
    return {**launch, "enable_fp_fusion": FP_FUSION}


def _words(variant: Variant) -> str:
    meta = " ".join(f"{name}={value}" for name, value in variant.meta)
    return f"{' '.join(str(dtype) for dtype in variant.dtypes)} {meta}"
