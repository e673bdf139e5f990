"""Which of its forms a kernel is launched in."""

from collections.abc import Mapping, Sequence
from typing import Any

from kernels.contract import Contract
from kernels.errors import ContractError

Meta = Mapping[str, int]


def narrowest(
    contract: Contract, metas: Sequence[Meta], block: str, size: str, arguments: Sequence[Any]
) -> Meta:
    """Of `metas`, which go from narrow to wide, the first whose constexpr `block` holds the
    argument `size`; of a launch that is not aligned, the last: there every width would be another
    variant to compile, for shapes that are rare. Raises ContractError when none does."""
    length = arguments[contract.names.index(size)]
    for meta in metas if contract.is_aligned(arguments) else metas[-1:]:
        if length <= meta[block]:
            return meta
    raise ContractError(contract.kernel, size, f"at most {metas[-1][block]}", f"{length}")
