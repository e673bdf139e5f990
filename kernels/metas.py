"""Which of its forms a kernel is launched in."""

from collections.abc import Mapping, Sequence

from kernels.errors import ContractError

Meta = Mapping[str, int]


def narrowest(kernel: str, metas: Sequence[Meta], block: str, size: str, length: int) -> Meta:
    """The first of `metas`, which go from narrow to wide, whose constexpr `block` holds the
    `length` that the contract calls `size`. Raises ContractError when none does."""
    for meta in metas:
        if length <= meta[block]:
            return meta
    raise ContractError(kernel, size, f"at most {metas[-1][block]}", f"{length}")
