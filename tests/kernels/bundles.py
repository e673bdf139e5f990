"""Bundles of made-up code for real kernels, written in milliseconds."""

from pathlib import Path

from kernels.bundle.bundle import installed_triton
from kernels.bundle.index import Index, Key
from kernels.bundle.sources import sources_of
from kernels.bundle.write import Code, Where, write

META = (("BLOCK", 1024), ("num_warps", 4))


def key(is_aligned: bool = True, dtype: str = "bfloat16", kernel: str = "silu_mul") -> Key:
    return Key(kernel, (dtype, dtype), META, is_aligned)


def code(name: str, *, is_exact: bool = False, waits: bool = False, shared_bytes: int = 0) -> Code:
    return Code(
        cubin=f"cubin of {name}".encode(),
        ptx=f"ptx of {name}".encode(),
        is_exact=is_exact,
        waits=waits,
        symbol="silu_mul_kernel",
        num_warps=4,
        shared_bytes=shared_bytes,
    )


def codes(*archs: int, is_aligned: bool = True, **options: str) -> dict[Where, Code]:
    """As Triton makes them: for one capability alone from 9.0 on."""
    return {
        (key(is_aligned, **options), arch): code(f"{is_aligned} {arch}", is_exact=arch >= 90)
        for arch in archs
    }


def write_bundle(
    folder: Path,
    codes: dict[Where, Code],
    *,
    sources: dict[str, str] | None = None,
    triton: str | None = None,
) -> Index:
    folder.mkdir(parents=True, exist_ok=True)
    if sources is None:
        sources = sources_of("kernels.silu_mul.kernel")
    return write(
        folder, codes, {each.kernel: sources for each, _ in codes},
        triton or installed_triton() or "none", fp_fusion=False,
    )  # fmt: skip
