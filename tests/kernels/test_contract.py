"""A negative test for each rule, with the message a caller will read; what is allowed beside."""

import numpy as np
import pytest
import torch

from kernels import contract as contract_module
from kernels.contract import (
    FLOATS,
    INT32_MAX,
    Contract,
    Count,
    InOut,
    Output,
    Scalar,
    Size,
    Stride,
    Tensor,
    lie_in_rows_apart,
    overlaps_itself,
    span_of,
)
from kernels.errors import ContractError

F32, BF16 = torch.float32, torch.bfloat16


def scale(**changed: object) -> Contract:
    """The contract of a kernel that scales rows, with arguments changed."""
    arguments = {
        "x": Tensor("rows size", FLOATS, layout="rows"),
        "weight": Tensor("size", like="x"),
        "out": Output("rows size", like="x"),
        "x_stride": Stride("x", 0),
        "size": Size("size"),
        "factor": Scalar(float, low=0.0, high=8.0),
    }
    return Contract("scale", **arguments | changed)


def arguments(**changed: object) -> list[object]:
    """Of a launch that is right, changed."""
    right = {
        "x": torch.zeros(3, 16)[:, :8],
        "weight": torch.zeros(8),
        "out": torch.zeros(3, 8),
        "x_stride": 16,
        "size": 8,
        "factor": 2.0,
    }
    return list((right | changed).values())


def refusal(contract: Contract, values: list[object]) -> str:
    """The message; the same one a second time, when the forms may have been remembered."""
    messages = set()
    for _ in range(2):
        with pytest.raises(ContractError) as failure:
            contract.check(*values)
        messages.add(str(failure.value))
    (message,) = messages
    return message


def odd(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """At an address that is one element past an aligned one."""
    num = torch.Size(shape).numel()
    return torch.zeros(num + 1, dtype=dtype)[1:].view(shape)


def test_a_right_launch_passes_and_is_remembered():
    contract = scale()
    for _ in range(2):
        contract.check(*arguments())
        contract.check(*arguments(x=torch.zeros(3, 8), x_stride=8, factor=3.0))


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "dtype": (
        {"x": torch.zeros(3, 8, dtype=torch.int32)},
        "x must be float32 or bfloat16 or float16, came int32",
    ),
    "like": (
        {"weight": torch.zeros(8, dtype=BF16)},
        "weight must be float32 like x, came bfloat16",
    ),
    "no tensor": ({"weight": [0.0] * 8}, "weight must be a tensor, came list"),
    "sparse": (
        {"weight": torch.zeros(8).to_sparse()},
        "weight must be a dense tensor, came sparse_coo",
    ),
    "opaque": (
        {"out": torch.zeros(3, 8).to_mkldnn()},
        "out must be a dense tensor, came _mkldnn",
    ),
    "rank": ({"x": torch.zeros(24)}, "x must be [rows size] of 2 dimensions, came [24]"),
    "shape": (
        {"out": torch.zeros(3, 9)},
        "out must be [rows size] where rows = 3, size = 8, came [3, 9]",
    ),
    "one number for each name": (
        {"weight": torch.zeros(9)},
        "weight must be [size] where size = 8, came [9]",
    ),
    "contiguous": (
        {"out": torch.zeros(8, 3).t()},
        "out must be contiguous, came strides (1, 3) of [3, 8]",
    ),
    "rows": (
        {"x": torch.zeros(8, 3).t()},
        "x must be contiguous in its last dimension, came strides (1, 3) of [3, 8]",
    ),
    "device": (
        {"weight": torch.zeros(8, device="meta")},
        "weight must be on cpu like x, came meta",
    ),
    "stride": ({"x_stride": 8}, "x_stride must be 16, the stride of x in axis 0, came 8"),
    "size": ({"size": 16}, "size must be 8, the size size, came 16"),
    "a size is an integer": ({"size": 8.0}, "size must be 8, the size size, came 8.0"),
    "range": ({"factor": 9.0}, "factor must be from 0.0 to 8.0, came 9.0"),
    "nan": ({"factor": float("nan")}, "factor must be from 0.0 to 8.0, came nan"),
    "type": ({"factor": "2"}, "factor must be of type float, came '2'"),
    "an integer is no float": ({"factor": 2}, "factor must be of type float, came 2"),
    "bool": ({"factor": True}, "factor must be of type float, came True"),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_rule_is_kept(rule):
    changed, message = WRONG[rule]
    contract = scale()
    contract.check(*arguments())
    assert refusal(contract, arguments(**changed)) == f"scale: {message}"


class OnDevice(torch.Tensor):
    """A tensor of a GPU that this host need not have."""

    @staticmethod
    def __new__(cls, device: str, *shape: int):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=F32, device=device)

    def data_ptr(self) -> int:
        return id(self) * 4096

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"a contract computes nothing, it called {function}")


def test_tensors_of_two_gpus():
    contract = Contract(
        "add", x=Tensor("size", F32), y=Tensor("size", F32), out=Output("size", F32)
    )
    on = {device: OnDevice(device, 8) for device in ("cuda:0", "cuda:1", "cpu")}
    contract.check(*[OnDevice("cuda:1", 8) for _ in range(3)])
    for device in ("cuda:0", "cpu"):
        assert refusal(contract, [on["cuda:1"], on[device], on["cuda:1"]]) == (
            f"add: y must be on cuda:1 like x, came {device}"
        )


def test_the_number_of_arguments():
    assert refusal(scale(), arguments()[:-1]) == (
        "scale: the arguments must be x weight out x_stride size factor, came 5 values"
    )


def test_what_went_wrong_can_be_asked_for():
    with pytest.raises(ContractError) as failure:
        scale().check(*arguments(size=9))
    assert (failure.value.kernel, failure.value.argument) == ("scale", "size")


def test_an_address_is_aligned():
    message = refusal(scale(), arguments(weight=odd(8)))
    assert message.startswith("scale: weight must be aligned to 16 bytes, came the address 0x")
    scale(weight=Tensor("size", like="x", align=4)).check(*arguments(weight=odd(8)))


def test_an_address_is_looked_at_though_the_form_is_known():
    contract = scale()
    contract.check(*arguments())
    assert "aligned to 16 bytes" in refusal(contract, arguments(weight=odd(8)))


def test_rows_start_at_multiples():
    contract = scale(x=Tensor("rows size", FLOATS, layout="rows", row_align=16))
    contract.check(*arguments())
    assert refusal(contract, arguments(x=torch.zeros(3, 9)[:, :8], x_stride=9)) == (
        "scale: x must be of rows that start at multiples of 16 bytes, "
        "came strides (9, 1) of [3, 8]"
    )


def test_one_column_has_any_stride():
    changed = {"x": torch.zeros(3, 5)[:, :1], "weight": odd(1), "out": torch.zeros(3, 1)}
    contract = scale(weight=Tensor("size", like="x", align=4))
    contract.check(*arguments(**changed, x_stride=5, size=1))


def test_a_stride_that_a_scalar_names_is_known_though_no_element_lies_there():
    contract = scale(x=Tensor("rows size", F32))
    one_row = {"weight": torch.zeros(8), "out": torch.zeros(1, 8), "size": 8}
    for stride in (16, 8, 16):
        x = torch.zeros(1, 16).as_strided((1, 8), (stride, 1))
        contract.check(*arguments(**one_row, x=x, x_stride=stride))
        assert "x_stride must be" in refusal(contract, arguments(**one_row, x=x, x_stride=12))


def test_a_number_may_be_of_a_type_of_its_own():
    scale().check(*arguments(factor=np.float64(2.0)))
    assert "came np.float64(9.0)" in refusal(scale(), arguments(factor=np.float64(9.0)))


def test_strided_takes_any_strides():
    contract = scale(x=Tensor("rows size", FLOATS, layout="strided"))
    contract.check(*arguments(x=torch.zeros(8, 3).t(), x_stride=1))


def test_no_elements():
    changed = {"x": torch.zeros(0, 8), "out": torch.zeros(0, 8), "x_stride": 8}
    scale().check(*arguments(**changed))


def test_a_multiple_of_a_dimension():
    contract = Contract("half", x=Tensor("rows 2*size", F32), size=Size("size"))
    contract.check(torch.zeros(2, 6), 3)
    assert refusal(contract, [torch.zeros(2, 7), 3]) == (
        "half: x must be [rows 2*size] where rows = 2, came [2, 7]"
    )
    assert (
        refusal(contract, [torch.zeros(2, 6), 6]) == "half: size must be 3, the size size, came 6"
    )


def test_a_number_as_a_dimension():
    contract = Contract("pixels", x=Tensor("rows 3", F32))
    contract.check(torch.zeros(2, 3))
    assert refusal(contract, [torch.zeros(2, 4)]) == (
        "pixels: x must be [rows 3] where rows = 2, came [2, 4]"
    )


def test_no_dimension():
    contract = Contract("scalar", x=Tensor("", F32))
    contract.check(torch.zeros(()))
    assert refusal(contract, [torch.zeros(1)]) == "scalar: x must be [] of 0 dimensions, came [1]"


def test_a_count_is_checked_and_chooses_no_variant():
    contract = Contract("rows", x=Tensor("rows size", F32), rows=Count("rows"), size=Size("size"))
    contract.check(torch.zeros(3, 16), 3, 16)
    assert contract.is_aligned([None, 3, 16])
    assert not contract.is_aligned([None, 16, 3])
    assert refusal(contract, [torch.zeros(3, 16), 4, 16]) == (
        "rows: rows must be 3, the size rows, came 4"
    )


def test_integers_from_and_to():
    contract = Contract("window", x=Tensor("size", F32), radius=Scalar(int, low=1, high=90))
    x = torch.zeros(4)
    contract.check(x, 90)
    assert refusal(contract, [x, 91]) == "window: radius must be from 1 to 90, came 91"
    assert refusal(contract, [x, 2.0]) == "window: radius must be of type int, came 2.0"


# Of memory


def test_what_is_stored_does_not_overlap_itself():
    contract = scale(out=Output("rows size", like="x", layout="rows"))
    contract.check(*arguments(out=torch.zeros(3, 9)[:, :8]))
    message = "scale: out must be of elements that lie apart, for it is stored, came strides "
    expanded = torch.zeros(1, 8).expand(3, 8)
    assert refusal(contract, arguments(out=expanded)) == message + "(0, 1) of [3, 8]"
    crossing = torch.zeros(24).as_strided((3, 8), (4, 1))
    assert refusal(contract, arguments(out=crossing)) == message + "(4, 1) of [3, 8]"


def test_what_is_read_may_overlap_itself():
    scale().check(*arguments(x=torch.zeros(1, 8).expand(3, 8), x_stride=0))


def test_what_is_stored_lies_apart_from_what_is_read():
    contract, x = scale(), torch.zeros(7, 8)
    contract.check(*arguments(x=x[:3], out=x[3:6], x_stride=8))
    for start in (0, 1, 2):
        message = refusal(contract, arguments(x=x[:3], out=x[start : start + 3], x_stride=8))
        assert message == (
            "scale: out must be apart from x in memory, for it is stored, "
            f"came an overlap from {x[start:].data_ptr():#x} on"
        )
    assert "out must be apart from x" in refusal(
        contract, arguments(x=x[2:5], out=x[:3], x_stride=8)
    )


def test_two_that_are_stored_lie_apart():
    contract = Contract("two", one=Output("size", F32), other=Output("size", F32))
    x = torch.zeros(12)
    contract.check(x[:4], x[4:8])
    assert refusal(contract, [x[:8], x[4:]]).startswith("two: one must be apart from other")


def test_two_that_are_read_may_overlap():
    x = torch.zeros(8)
    Contract("read", one=Tensor("size", F32), other=Tensor("size", F32)).check(x, x)


@pytest.mark.parametrize("kind", [Output, InOut])
def test_in_place_is_the_very_tensor(kind):
    contract = scale(out=kind("rows size", like="x", in_place=("x",)))
    x = torch.zeros(4, 8)
    contract.check(*arguments(x=x[:3], out=x[:3], x_stride=8))
    assert refusal(contract, arguments(x=x[:3], out=x[1:], x_stride=8)) == (
        "scale: out must be apart from x in memory, for it is stored (or be x itself), "
        f"came an overlap from {x[1:].data_ptr():#x} on"
    )


def test_in_place_is_of_one_dtype():
    contract = Contract("cast", x=Tensor("size"), out=Output("size", in_place=("x",)))
    x = torch.zeros(8)
    contract.check(x, x)
    assert "(or be x itself)" in refusal(contract, [x, x.view(torch.int32)])


def test_columns_of_one_matrix_lie_apart():
    contract = scale(out=Output("rows size", like="x", layout="rows"))
    matrix = torch.zeros(3, 24)
    contract.check(*arguments(x=matrix[:, :8], out=matrix[:, 8:16], x_stride=24))
    contract.check(*arguments(x=matrix[:, 16:], out=matrix[:, 8:16], x_stride=24))
    assert "apart from x" in refusal(
        contract, arguments(x=matrix[:, :8], out=matrix[:, 4:12], x_stride=24)
    )


def test_columns_of_one_matrix_that_wrap_around_do_not_lie_apart():
    flat = torch.zeros(48)
    one = flat.as_strided((2, 8), (16, 1))
    beyond = flat.as_strided((2, 8), (16, 1), 12)  # its rows end in the next row of `one`
    assert not lie_in_rows_apart(one, beyond)
    assert lie_in_rows_apart(one, flat.as_strided((2, 8), (16, 1), 8))
    assert not lie_in_rows_apart(*[torch.zeros(8).as_strided((1, 8), (0, 1))] * 2)


def test_addresses_are_compared_though_the_form_is_known():
    contract, x = scale(), torch.zeros(3, 8)
    contract.check(*arguments(x=x, x_stride=8))
    assert "apart from x" in refusal(contract, arguments(x=x, out=x, x_stride=8))


# Of the width of an index


def huge(*shape: int, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=F32, device="meta")


@pytest.mark.parametrize(("stride", "fits"), [(2**30 - 5, True), (2**30, False)])
def test_offsets_fit_in_int32(stride, fits):
    x = huge(3, 8, strides=(stride, 1))
    contract = Contract("read", x=Tensor("rows size", F32, layout="rows"))
    assert (span_of(x) <= INT32_MAX) == fits
    if fits:
        contract.check(x)
    else:
        assert refusal(contract, [x]) == (
            f"read: x must be of at most {INT32_MAX} elements, for its offsets are int32, "
            f"came {2**31 + 8}"
        )
        Contract("read", x=Tensor("rows size", F32, layout="rows", wide_index=True)).check(x)


def test_spans():
    assert span_of(torch.zeros(3, 8)[:, :5]) == 21
    assert span_of(torch.zeros(0, 8)) == 0
    assert span_of(torch.zeros(())) == 1
    assert not overlaps_itself(torch.zeros(3, 4).t())
    assert overlaps_itself(torch.zeros(3, 1).expand(3, 2))
    assert not overlaps_itself(torch.zeros(1, 4).as_strided((1, 4), (0, 1)))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(contract_module, "MAX_REMEMBERED", 3)
    contract = Contract("read", x=Tensor("size", F32))
    for size in range(10):
        contract.check(torch.zeros(size))
        assert len(contract._remembered) <= 3
    assert refusal(contract, [torch.zeros(2, dtype=BF16)]) == (
        "read: x must be float32, came bfloat16"
    )
