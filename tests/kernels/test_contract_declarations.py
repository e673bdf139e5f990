"""A contract that cannot be right is refused when it is made."""

from collections.abc import Callable

import pytest
import torch

from kernels.contract import Contract, Output, Size, Stride, Tensor

F32 = torch.float32
X = Tensor("rows size", F32)
DECLARATIONS: dict[str, tuple[Callable[[], object], str]] = {
    "order": (
        lambda: Contract("k", size=Size("size"), x=X),
        "k: a contract names its tensors first, then its scalars",
    ),
    "dimension": (
        lambda: Contract("k", x=Tensor("Rows size", F32)),
        "'Rows' is no dimension: size, 2*size or 3 are",
    ),
    "like": (
        lambda: Contract("k", x=Tensor("size", like="y"), y=X),
        "k: x is like y, no tensor before it",
    ),
    "in place": (
        lambda: Contract("k", x=X, out=Output("size", in_place=("z",))),
        "k: out is in place of ('z',): no tensor",
    ),
    "align": (
        lambda: Contract("k", x=Tensor("size", F32, align=12)),
        "k: x is aligned to 12: no power of 2",
    ),
    "rows": (
        lambda: Contract("k", x=Tensor("", F32, layout="rows")),
        "k: x has no dimension: it cannot have rows",
    ),
    "size": (
        lambda: Contract("k", x=X, width=Size("width")),
        "k: width is the size width: no dimension",
    ),
    "stride": (
        lambda: Contract("k", x=X, y_stride=Stride("y", 0)),
        "k: y_stride is the stride of y in axis 0: there is none",
    ),
    "axis": (
        lambda: Contract("k", x=X, x_stride=Stride("x", 2)),
        "k: x_stride is the stride of x in axis 2: there is none",
    ),
}


@pytest.mark.parametrize("wrong", DECLARATIONS)
def test_a_wrong_declaration_is_refused_when_it_is_made(wrong):
    declare, message = DECLARATIONS[wrong]
    with pytest.raises(TypeError) as failure:
        declare()
    assert str(failure.value) == message
