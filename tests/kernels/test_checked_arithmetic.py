"""The checked interpreter rounds as a GPU does, where Triton's own does not."""

import pytest
import torch

from tests.kernels import planted
from tests.kernels.planted import SIZE, launch, seeded


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int16).tolist()


HARD = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, -1e-40, 0.0, -0.0, float("inf"), 1e-3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_to_nearest_even(dtype):
    wide = torch.cat([torch.tensor(HARD), torch.randn(500, generator=seeded())])
    narrow = torch.empty(wide.shape, dtype=dtype)
    launch("cast", planted.PAIR, (32,), wide, narrow, wide.numel())
    assert bits(narrow) == bits(wide.to(dtype))


def test_nan_stays_nan():
    wide, narrow = torch.tensor([float("nan"), -float("nan")]), torch.empty(2, dtype=torch.bfloat16)
    launch("cast", planted.PAIR, (1,), wide, narrow, 2)
    assert narrow.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.float16])
def test_bfloat16_casts_to_and_from_other_types(dtype):
    x = torch.arange(SIZE, dtype=torch.bfloat16)
    there, back = torch.empty(SIZE, dtype=dtype), torch.empty_like(x)
    launch("cast", planted.PAIR, (2,), x, there, SIZE)
    launch("cast", planted.PAIR, (2,), there, back, SIZE)
    assert torch.equal(there, x.to(dtype))
    assert torch.equal(back, x)


def test_arithmetic_in_bfloat16():
    x = torch.randn(500, generator=seeded()).bfloat16() * 3
    out = torch.empty_like(x)
    launch("square_and_add", planted.ONE_DTYPE, (32,), x, out, 500)
    assert bits(out) == bits(torch.where(x > 1, x * x + x, -x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_dot_whose_sums_do_not_depend_on_their_order(dtype):
    x, out = torch.randn(16, 16, generator=seeded()).to(dtype), torch.empty(16, 16)
    launch("product", planted.SQUARE, (1,), x, out, 16)
    assert torch.equal(out, (x.double() @ x.double().T).float())


def test_sums():
    x, out = torch.arange(10, dtype=torch.float32), torch.empty(10)
    launch("sums", planted.VECTOR, (1,), x, out, 10)
    assert (out == 0).all()


def test_a_float_is_float32_as_on_a_gpu():
    x, out = torch.ones(SIZE), torch.empty(SIZE)
    launch("scaled", planted.SCALED, (2,), x, out, SIZE, 2.0**-25)
    assert (out == 1).all()  # in float64 the sum of 1 and 2^-25 would not be 1
