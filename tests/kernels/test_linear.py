from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.linear import reference
from kernels.linear.api import (
    LINEARS,
    SILU_MULS,
    Form,
    LinearPlan,
    PackedLinear,
    in_few_steps,
    linear,
    linear_silu_mul,
    multiply,
    pack_linear,
    rounded_up,
)
from tests.kernels.launches import assert_bundled, launches_of
from tests.kernels.linear_weights import normal, planned, weights_of
from tests.kernels.tolerances import DTYPES, ROUNDINGS

NARROW = pytest.mark.parametrize("dtype", reference.NARROW)


def in_float32(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    product = F.linear(x.float(), packed.weight.float(), packed.added.float())
    return product.to(packed.out_dtype or x.dtype)


def silu_mul_in_float32(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    gate, up = in_float32(x, packed).chunk(2, dim=-1)
    return F.silu(gate.float()).to(x.dtype) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "in_size", "out_size"), [(1, 5, 3), (8, 64, 96), (33, 7, 1), (131, 7, 5)]
)
def test_packed_equals_the_matrix_product(
    dtype: torch.dtype, has_bias: bool, num_tokens: int, in_size: int, out_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, in_size, generator=generator).to(dtype)
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype) if has_bias else None

    product = linear(x, pack_linear(weight, bias))

    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert product.dtype == dtype
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_too_a_row_may_depend_on_itself_alone(dtype: torch.dtype) -> None:
    x, packed = normal(70, 1536).to(dtype), pack_linear(normal(576, 1536).to(dtype))
    whole = linear(x, packed, deterministic=True)
    for num_rows in (0, 1, 2, 7, 8, 9, 33):
        for start in (0, 1, 37):
            rows = slice(start, start + num_rows)
            alone = linear(x[rows].contiguous(), packed, deterministic=True)
            assert torch.equal(alone, whole[rows])
    torch.testing.assert_close(whole, linear(x, packed), rtol=1e-2, atol=1e-3)


def test_onednn_is_shown_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    product, shown = torch.ops.mkldnn._linear_pointwise, set()

    def look(x: torch.Tensor, *others: object) -> torch.Tensor:
        shown.add(len(x))
        return product(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", look)
    packed, x = pack_linear(normal(3, 5)), normal(300, 5)

    assert all(len(linear(x[:num_rows], packed)) == num_rows for num_rows in range(257))

    assert set(range(65)) < shown
    assert len(shown - {0}) == 128


def test_rows_in_few_steps_are_hardly_more() -> None:
    for num_rows in range(2050):
        assert num_rows <= in_few_steps(num_rows) <= num_rows * 33 / 32
    assert len({in_few_steps(num_rows) for num_rows in range(1, 2049)}) == 224


def test_no_rows_give_no_rows() -> None:
    assert linear(torch.zeros(0, 8), pack_linear(torch.zeros(4, 8))).shape == (0, 4)


def test_a_strided_input_is_read_right() -> None:
    x = torch.arange(24.0).view(4, 6)[:, ::2]

    product = linear(x, pack_linear(torch.eye(3)))

    assert torch.equal(product, x)


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError):
        linear(torch.zeros(1, 5), pack_linear(torch.zeros(4, 8)))


FORMS = [pytest.param(form, id=f"{form.launch.contract.kernel} {form.meta}") for form in LINEARS]
SILU_FORMS = [
    pytest.param(form, id=f"{form.launch.contract.kernel} {form.meta}") for form in SILU_MULS
]


@NARROW
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("in_size", "out_size"), [(1, 1), (1200, 33), (1024, 16), (7, 70)])
def test_a_form_equals_the_reference(
    form: Form, in_size: int, out_size: int, dtype: torch.dtype
) -> None:
    packed = weights_of(out_size, in_size, dtype, planned(form))
    for num_rows in {1, form.max_rows // 2 + 1}:
        x = normal(num_rows, in_size + 3, dtype=dtype)[:, :in_size]

        assert_equals_reference(linear, in_float32, x, packed, rtol=ROUNDINGS[dtype], atol=1e-6)


@NARROW
@pytest.mark.parametrize("form", FORMS)
def test_a_float32_product_is_not_rounded(form: Form, dtype: torch.dtype) -> None:
    packed = weights_of(40, 1200, dtype, planned(form), torch.float32)
    x = normal(form.max_rows // 2 + 1, 1200, dtype=dtype)

    assert_equals_reference(linear, in_float32, x, packed, rtol=1e-6, atol=2e-6)


@NARROW
def test_the_fixed_kernel_does_not_round_a_float32_product(dtype: torch.dtype) -> None:
    packed, x = weights_of(70, 130, dtype, out_dtype=torch.float32), normal(67, 130, dtype=dtype)
    fixed = partial(linear, deterministic=True)

    assert_equals_reference(fixed, in_float32, x, packed, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_without_the_kernels_a_product_may_be_float32_too(
    dtype: torch.dtype, has_bias: bool
) -> None:
    x, weight = normal(3, 8, dtype=dtype), normal(4, 8, dtype=dtype)
    bias = normal(4, dtype=dtype) if has_bias else None

    product = linear(x, pack_linear(weight, bias, out_dtype=torch.float32))

    assert product.dtype == torch.float32
    assert torch.equal(product, linear(x, pack_linear(weight, bias)).float())


@NARROW
@pytest.mark.parametrize("form", SILU_FORMS)
@pytest.mark.parametrize(("in_size", "size"), [(1, 1), (1200, 33), (512, 16)])
def test_a_form_with_the_activation_equals_two_operations(
    form: Form, in_size: int, size: int, dtype: torch.dtype
) -> None:
    packed = weights_of(2 * size, in_size, dtype, planned(form))
    for num_rows in {1, form.max_rows // 2 + 1}:
        x = normal(num_rows, in_size + 3, dtype=dtype)[:, :in_size]

        assert_equals_reference(
            linear_silu_mul, silu_mul_in_float32, x, packed, rtol=2 * ROUNDINGS[dtype], atol=1e-4
        )


def test_the_activation_without_a_plan_is_two_operations() -> None:
    packed, x = weights_of(12, 8, torch.bfloat16), normal(3, 8, dtype=torch.bfloat16)

    torch.testing.assert_close(
        linear_silu_mul(x, packed), silu_mul_in_float32(x, packed), rtol=0.02, atol=1e-3
    )


@pytest.mark.parametrize("form", [form for form in FORMS if form.values[0].max_rows > 1])
def test_nan_and_infinity_stay_in_their_row(form: Form) -> None:
    packed = weights_of(40, 520, torch.bfloat16, planned(form))
    x = normal(5, 520, dtype=torch.bfloat16)
    x[0, 5], x[3, 519] = float("nan"), float("inf")

    with checked():
        product, rest = linear(x, packed), linear(x[[1, 2, 4]], packed)

    assert product[0].isnan().all()
    assert not product[3].isfinite().any()
    assert torch.equal(product[[1, 2, 4]], rest)


def test_no_rows_launch_nothing() -> None:
    packed = weights_of(40, 8, torch.bfloat16, planned(LINEARS[-1]))
    x = torch.zeros(0, 8, dtype=torch.bfloat16)

    with checked():
        assert linear(x, packed).shape == (0, 40)
        assert linear(x, packed, deterministic=True).shape == (0, 40)
        assert linear_silu_mul(x, packed).shape == (0, 20)


def test_rows_are_rounded_up_to_a_power_of_2() -> None:
    assert [rounded_up(each) for each in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)] == [
        0, 1, 2, 4, 4, 8, 8, 16, 16, 32,
    ]  # fmt: skip


def test_only_planned_numbers_of_rows_go_to_the_kernel() -> None:
    plan = LinearPlan(dict.fromkeys((2, 8), LINEARS[-1]))
    packed = weights_of(16, 32, torch.bfloat16, plan)

    def num_launches(num_rows: int) -> int:
        x = torch.zeros(num_rows, 32, dtype=torch.bfloat16)
        return len(launches_of(lambda: linear(x, packed)))

    assert [num_launches(each) for each in range(12)] == [0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size"), [(1, 1, 1), (3, 130, 70), (65, 64, 64), (67, 7, 1)]
)
def test_the_fixed_kernel_equals_its_reference(
    num_rows: int, in_size: int, out_size: int, dtype: torch.dtype
) -> None:
    packed = weights_of(out_size, in_size, dtype)
    x = normal(num_rows, in_size + 3, dtype=dtype)[:, :in_size]

    assert_equals_reference(
        partial(linear, deterministic=True), in_float32, x, packed, rtol=ROUNDINGS[dtype], atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    packed, x = weights_of(70, 200, dtype), normal(65, 200, dtype=dtype)
    places = torch.randperm(65, generator=torch.Generator().manual_seed(2))
    fixed: Callable[[torch.Tensor], torch.Tensor] = partial(
        linear, packed=packed, deterministic=True
    )

    with checked():
        together = fixed(x)

        assert torch.equal(fixed(x[places]), together[places])
        for row in (0, 1, 31, 32, 63, 64):
            assert torch.equal(fixed(x[row : row + 1]), together[row : row + 1])
        for num_rows in (2, 3, 16, 31, 33, 64):
            assert torch.equal(fixed(x[:num_rows]), together[:num_rows])
            assert torch.equal(fixed(x[-num_rows:]), together[-num_rows:])


def test_any_number_of_rows_has_the_same_form() -> None:
    packed = weights_of(16, 32, torch.bfloat16, planned(LINEARS[-1]))

    forms = {
        launches_of(lambda x=x: linear(x, packed, deterministic=True))[0][1]
        for x in (torch.zeros(rows, 32, dtype=torch.bfloat16) for rows in (1, 2, 16, 65, 5000))
    }

    assert len(forms) == 1


def test_other_weights_and_rows_are_refused() -> None:
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    packed = weights_of(16, 32, torch.float16)

    with checked():
        with pytest.raises(ContractError, match="weight must be bfloat16 like x, came float16"):
            linear(x, packed, deterministic=True)
        with pytest.raises(ContractError, match="x must be contiguous in its last dimension"):
            linear(x.half().expand(2, 2, 32).flatten(1)[:, ::2], packed, deterministic=True)


def test_more_rows_than_a_form_has_are_refused() -> None:
    packed = weights_of(16, 32, torch.bfloat16, LinearPlan({4: LINEARS[0]}))
    with checked(), pytest.raises(AssertionError, match="max_rows=1"):
        linear(torch.zeros(3, 32, dtype=torch.bfloat16), packed)


def test_every_launch_has_its_variant() -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    for form in [*LINEARS, *SILU_MULS]:
        rows = x[: form.max_rows]
        assert_bundled(partial(multiply, form, rows, weights_of(32, 64, x.dtype)))
    assert_bundled(partial(linear, x, weights_of(32, 64, x.dtype), deterministic=True))
    wide = weights_of(32, 64, x.dtype, out_dtype=torch.float32)
    for form in LINEARS:
        assert_bundled(partial(multiply, form, x[: form.max_rows], wide))
    assert_bundled(partial(linear, x, wide, deterministic=True))
