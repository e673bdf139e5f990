"""What is drawn, and from which tokens; the kernels equal their reference, token for token."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.sampling import reference
from kernels.sampling.api import sample
from kernels.sampling.reference import GROUP, SPAN
from tests.kernels.launches import assert_bundled
from tests.kernels.sampling_rows import GREEDY, ROWS, Row, mask_of, normal, parameters_of

LOGITS = torch.tensor([1.0, 3.0, -1.0, 2.0, 0.5, 2.9])
INF, NAN = float("inf"), float("nan")


def drawn(row: Row, logits: torch.Tensor = LOGITS, num_draws: int = 300) -> list[int]:
    """The tokens that so many draws give."""
    many = logits.expand(num_draws, -1).contiguous()
    return sample(many, *parameters_of(*[row] * num_draws)).unique().tolist()


def assert_kernel_equals(
    logits: torch.Tensor, *rows: Row, mask: torch.Tensor | None = None
) -> None:
    assert_equals_reference(sample, reference.sample, logits, *parameters_of(*rows), mask)


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (GREEDY, [1]),
        (Row(), [0, 1, 2, 3, 4, 5]),
        (Row(temperature=1e-9), [1]),
        (Row(min_p=0.3), [1, 3, 5]),
        (Row(min_p=1.0), [1]),
        (Row(top_k=3), [1, 3, 5]),
        (Row(top_k=6), [0, 1, 2, 3, 4, 5]),
        (Row(top_p=0.0), [1]),
        (Row(top_p=0.6), [1, 5]),
        (Row(top_k=3, top_p=0.6), [1, 5]),
    ],
)
def test_what_is_kept(row: Row, kept: list[int]) -> None:
    assert drawn(row) == kept


def test_ties_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])

    assert drawn(Row(top_k=2), logits) == [0, 1, 2, 4]
    assert drawn(Row(top_p=0.5), logits) == [0, 1, 2, 4]


def test_a_draw_is_the_inverse_of_the_distribution_function() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4000, -1).contiguous()

    token_ids = sample(logits, *parameters_of(*[Row()] * 4000))

    shares = token_ids.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.03, rtol=0.0)


@pytest.mark.parametrize("vocab", [1, 5, GROUP, GROUP + 1, SPAN, 2 * SPAN + 16])
def test_the_kernels_equal_their_reference(vocab: int) -> None:
    assert_kernel_equals(3 * normal(len(ROWS), vocab), *ROWS)


def test_a_span_of_one_token() -> None:
    assert_kernel_equals(normal(5, SPAN + 1), *ROWS[:2], Row(top_k=9), Row(top_p=0.1), Row())


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_flat_and_steep_rows(spread: float) -> None:
    rows = [Row(top_p=0.5), Row(top_k=200), Row(top_k=30, top_p=0.9), Row(min_p=0.001)]

    assert_kernel_equals(spread * normal(len(rows), 912, seed=1), *rows)


def test_values_of_all_sizes() -> None:
    """Whose depths lie in many powers of two: what top-k and top-p are looked for in."""
    rows = [Row(top_p=share) for share in (0.001, 0.4, 0.75, 0.999)]
    rows += [replace(GREEDY, temperature=0.5, top_k=rank) for rank in (1, 2, 100, 399)]
    logits = -torch.exp2(20 * normal(len(rows), 400, seed=2))

    assert_kernel_equals(logits, *rows)


def test_rows_of_few_values() -> None:
    rows = [Row(top_k=5), Row(top_p=0.2), Row(top_p=0.7), Row(top_k=300, top_p=0.7), GREEDY]
    logits = normal(len(rows), 608, seed=3).round()
    logits[0] = 1.0

    assert_kernel_equals(logits, *rows)


def test_the_greatest_of_equals_is_the_lowest() -> None:
    logits = torch.zeros(4, 2 * SPAN)
    for row, places in enumerate([(700, 699), (SPAN, SPAN - 1), (2 * SPAN - 1, 300), (0, 1)]):
        logits[row, list(places)] = 2.0

    with checked():
        assert sample(logits, *parameters_of(*[GREEDY] * 4)).tolist() == [699, SPAN - 1, 300, 0]


def test_a_mask_forbids() -> None:
    rows = [*ROWS[:10], Row(top_p=0.9), GREEDY, Row(top_k=4), Row(min_p=0.2)]
    allowed = normal(len(rows), SPAN + 75, seed=4) > 0
    allowed[1], allowed[2] = False, False
    allowed[1, 31], allowed[2, SPAN + 74] = True, True  # a sign, and the last one

    assert_kernel_equals(normal(*allowed.shape), *rows, mask=mask_of(allowed))
    token_ids = sample(normal(*allowed.shape), *parameters_of(*rows), mask_of(allowed))
    assert allowed[torch.arange(len(rows)), token_ids].all()


def test_without_any_mass_the_greatest_is_taken() -> None:
    rows = [GREEDY, Row(), Row(top_k=2), Row(top_p=0.5), Row(min_p=0.1)]
    nothing = torch.full((len(rows), 70), -INF)

    with checked():
        assert sample(nothing, *parameters_of(*rows)).tolist() == [0] * len(rows)
        mask = mask_of(torch.zeros(len(rows), 70, dtype=torch.bool))
        assert sample(nothing + NAN, *parameters_of(*rows), mask).tolist() == [0] * len(rows)
        nothing[:, 41:] = INF
        assert sample(nothing, *parameters_of(*rows)).tolist() == [41] * len(rows)


def test_nan_and_infinite_logits_are_never_drawn() -> None:
    rows = [*ROWS[:10], *ROWS[12:]]
    logits = normal(len(rows), 300, seed=5)
    logits[:, ::3], logits[:, 1::7], logits[:, 2::11] = NAN, -INF, -3e38

    assert_kernel_equals(logits, *rows)
    kept = sample(logits, *parameters_of(*rows))
    assert logits[torch.arange(len(rows)), kept].isfinite().all()


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    logits, parameters = normal(len(ROWS), 300, seed=6), parameters_of(*ROWS)
    mask = mask_of(normal(len(ROWS), 300, seed=7) > -1)
    with checked():
        together = sample(logits, *parameters, mask)
        for row in range(0, len(ROWS), 3):
            alone = (each[row : row + 1] for each in (logits, *parameters, mask))
            assert sample(*alone).item() == together[row]


@pytest.mark.parametrize("value", [0, -1, 77])
def test_scratch_is_read_where_it_was_stored(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = torch.Tensor.new_empty
    rows = ROWS[:17]

    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *sizes, **of: new_empty(self, *sizes, **of).fill_(value),
    )

    assert_kernel_equals(2 * normal(len(rows), 500, seed=9), *rows)


def test_uniforms_of_the_kernel_are_those_of_the_reference() -> None:
    """Of a flat row the token says the first digits of u: any seed, any position."""
    floats, numbers, _ = parameters_of(*[Row()] * 32)
    numbers[:, 1] = torch.randint(-(2**63), 2**63 - 1, (32,), generator=torch.Generator())
    positions = torch.arange(32) * (2**63 // 31 - 1)
    logits = torch.zeros(32, 1008)

    assert_equals_reference(sample, reference.sample, logits, floats, numbers, positions)


def test_a_vocabulary_of_the_wide_form() -> None:
    vocab = 512 * GROUP + 16

    assert_kernel_equals(5 * normal(2, vocab, seed=8), Row(top_k=50, top_p=0.8), Row())


def test_no_rows() -> None:
    with checked():
        assert sample(torch.empty(0, 100), *parameters_of()).shape == (0,)


def test_a_vocabulary_that_no_form_holds_is_refused() -> None:
    with checked(), pytest.raises(ContractError, match="groups must be at most 2048, came 2049"):
        sample(torch.zeros(1, 2048 * GROUP + 1), *parameters_of(Row()))


@pytest.mark.parametrize("vocab", [49152, 50257, 128256, 151936, 262208])
@pytest.mark.parametrize("has_mask", [False, True])
def test_the_bundle_has_every_launch(vocab: int, has_mask: bool) -> None:
    logits = torch.empty(3, vocab)
    mask = torch.zeros(3, math.ceil(vocab / 32), dtype=torch.int32) if has_mask else None

    assert_bundled(lambda: sample(logits, *parameters_of(*[Row()] * 3), mask))
