"""Which form multiplies by which weight: what is fastest by the clock."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernels.linear.api import (
    LINEARS,
    SILU_MULS,
    Form,
    LinearPlan,
    PackedLinear,
    pack_linear,
)
from kernels.linear.choose import choose_linears
from tests.kernels.linear_weights import planned, weights_of


class Clock:
    """Times a product by what it is a product of, and runs none."""

    def __init__(self, form_us: dict[Form, float], plain_us: float) -> None:
        self.form_us, self.plain_us = form_us, plain_us
        self.asked: list[tuple[int, int]] = []  # rows, weights

    def __call__(self, product: Any, weights: Sequence[PackedLinear]) -> float:
        *forms, x = product.args
        self.asked.append((len(x), len(weights)))
        assert all(len(x) <= form.max_rows for form in forms)
        return self.form_us.get(forms[0], self.plain_us + 1) if forms else self.plain_us


ONE, FEW, FEW_TOO, MANY = (
    next(form for form in LINEARS if form.max_rows == 1),
    *(form for form in LINEARS if form.max_rows == 8),
    next(form for form in LINEARS if form.max_rows == 16),
)


def test_the_fastest_form_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    layers = [weights_of(32, 64, torch.bfloat16) for _ in range(3)]
    clock = Clock({ONE: 8.0, FEW: 9.0, FEW_TOO: 8.5, MANY: 8.2}, plain_us=10.0)

    with caplog.at_level(logging.INFO):
        choose_linears(layers, time_us=clock)

    expected = LinearPlan({1: ONE, 2: FEW_TOO, 4: FEW_TOO, 8: FEW_TOO, 16: MANY})
    assert all(each.plan == expected for each in layers)
    assert {rows for rows, _ in clock.asked} == {1, 2, 4, 8, 16, 32}
    assert {count for _, count in clock.asked} == {3}
    expected_text = "linear 32x64: us by rows (without the kernels): 1: 8.0 (10.0), 2: 8.5 (10.0)"
    assert expected_text in caplog.text


def test_a_gpu_of_little_shared_memory_is_spared_some_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels.linear.choose._shared_bytes", lambda device: 101_376)
    layer = weights_of(32, 64, torch.bfloat16)

    choose_linears([layer], time_us=Clock({FEW: 8.0, MANY: 8.0}, plain_us=10.0))

    assert layer.plan == LinearPlan(dict.fromkeys((1, 2, 4, 8), FEW))


def test_float32_products_are_chosen_by_themselves() -> None:
    layer, head = (weights_of(32, 64, torch.bfloat16, out_dtype=o) for o in (None, torch.float32))

    def time_us(product: Any, weights: Sequence[PackedLinear]) -> float:
        assert len(weights) == 1
        is_form = isinstance(product.args[0], Form)
        return 8.0 if is_form == (weights[0] is head) else 9.0

    choose_linears([layer, head], time_us=time_us)

    assert layer.plan == LinearPlan()
    assert set(head.plan.linears) == {1, 2, 4, 8, 16, 32}


def test_gate_ups_are_chosen_for_both_products() -> None:
    layer, gate_up = (weights_of(size, 64, torch.bfloat16) for size in (16, 32))

    choose_linears([layer], [gate_up], Clock({ONE: 9.0, SILU_MULS[-1]: 8.5}, plain_us=10.0))

    assert layer.plan == LinearPlan({1: ONE})
    assert gate_up.plan == LinearPlan({1: ONE}, dict.fromkeys((1, 2, 4, 8), SILU_MULS[-1]))


def test_a_second_choice_is_made_beside_cublas() -> None:
    layer = weights_of(16, 64, torch.bfloat16, planned(ONE))

    choose_linears([layer], time_us=lambda product, weights: float(bool(layer.plan.linears)))

    assert layer.plan == LinearPlan()


def test_what_the_kernels_do_not_take_is_left_alone() -> None:
    odd = [weights_of(*size, torch.bfloat16) for size in ((33, 64), (32, 65))]
    wide = [weights_of(32, 64, torch.float32), pack_linear(torch.zeros(32, 64))]
    odd_half = weights_of(16, 64, torch.bfloat16)
    all_forms = dict.fromkeys([*LINEARS, *SILU_MULS], 1.0)

    choose_linears([*odd, *wide], [odd_half], Clock(all_forms, plain_us=2.0))

    assert all(each.plan == LinearPlan() for each in [*odd, *wide])
    assert odd_half.plan.silu_muls == {}
