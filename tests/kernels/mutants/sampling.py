"""Mutants of sampling."""

import torch

from kernels.errors import ContractError, DoubleStore, OutOfBounds, Uninitialised
from kernels.sampling.reference import GROUP, SPAN, sample
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.sampling_rows import GREEDY, Row, mask_of, normal, parameters_of

FILTERS = [Row(top_k=3), Row(top_k=200), Row(top_p=0.4), Row(top_p=0.95), Row(min_p=0.3)]
FILTERS += [Row(top_k=9, top_p=0.5), Row(top_k=100, top_p=0.9), Row(min_p=0.1, top_k=50, top_p=0.7)]
Arguments = tuple[torch.Tensor, ...]


def filtered() -> Arguments:
    rows = 2 * FILTERS
    return normal(len(rows), 304), *parameters_of(*rows)


def plain() -> Arguments:
    return normal(4, 33), *parameters_of(GREEDY, Row(), Row(temperature=0.4), Row(min_p=0.2))


def of_two_spans() -> Arguments:
    return normal(6, SPAN + GROUP), *parameters_of(GREEDY, *[Row(), Row(top_k=9)] * 2, Row())


def masked() -> Arguments:
    allowed = normal(5, 100, seed=4) > 0.5
    return normal(5, 100), *parameters_of(GREEDY, *[Row()] * 4), mask_of(allowed)


def of_equals() -> Arguments:
    logits = torch.zeros(2, 2 * GROUP)
    logits[0, [5, 99, 300]], logits[1, [40, 41]] = 1.0, 1.0
    return logits, *parameters_of(GREEDY, GREEDY)


def with_nan() -> Arguments:
    logits = normal(4, 64)
    logits[:, ::2], logits[0] = float("nan"), float("nan")
    return logits, *parameters_of(GREEDY, *[Row()] * 3)


def nearly_equal() -> Arguments:
    return 1e-5 * normal(4, 32), *parameters_of(*[Row(temperature=1e-7)] * 4)


def of_one_token_a_group() -> Arguments:
    logits = torch.full((4, SPAN + GROUP), -50.0)
    logits[:, 7::GROUP] = normal(4, 9)
    return logits, *parameters_of(*[Row(top_k=5, temperature=5.0)] * 4)


def of_the_first_three() -> Arguments:
    return normal(8, 32), *parameters_of(*[Row(top_k=3, temperature=20.0)] * 8)


def of_a_token_above_many() -> Arguments:
    """Which weigh more than it does, together."""
    logits = 0.3 * normal(4, 304)
    logits[:, 70] = 5.0
    return logits, *parameters_of(*[Row(top_p=0.5)] * 4)


OP = Op(
    "sampling",
    "sample",
    sample,
    {
        "plain": plain,
        "equals": of_equals,
        "NaN": with_nan,
        "masked": masked,
        "nearly equal": nearly_equal,
        "two spans": of_two_spans,
        "a token a group": of_one_token_a_group,
        "the first three": of_the_first_three,
        "many below": of_a_token_above_many,
        "filtered": filtered,
    },
)
COUNTED = """last_kept(row_ptr, counts, kept, target, True, WIDTH)
                masses = masses_to(row_ptr, counts, kept, WIDTH)
"""
WEIGHED = COUNTED.replace("True", "False")
PLAIN_MASS = "mass = tl.where(depth <= kept, mass_of(depth), 0.0)"
MUTANTS = {
    OP: [
        Mutant(
            "tokens past the last",
            "mask=token < vocab, other=float",
            "mask=token <= vocab, other=float",
            OutOfBounds,
            "load of logits",
        ),
        Mutant(
            "a mask that is not there",
            "if is_masked != 0:",
            "if is_masked >= 0:",
            OutOfBounds,
            "load of mask",
        ),
        Mutant("a mask unread", "if is_masked != 0:", "if is_masked < 0:", DIFFERS),
        Mutant("bits of a byte from the top", "(token % WORD)", "(token % WORD ^ 7)", DIFFERS),
        Mutant("mask of the first row", "row * words", "row * 0", DIFFERS),
        Mutant("a stride for the other", "row * words", "row * vocab", OutOfBounds, "load of mask"),
        Mutant(
            "NaN stays", 'tl.where(logit > float("-inf"), logit, float("-inf"))', "logit", DIFFERS
        ),
        Mutant(
            "groups past the last",
            "mask=group < groups",
            "mask=group <= groups",
            DoubleStore,
            "store of greatest",
            within="sample_greatest_kernel",
        ),
        Mutant(
            "spans that overlap",
            "tl.program_id(0) * GROUPS_OF_SPAN +",
            "tl.program_id(0) +",
            DoubleStore,
            "store of greatest",
        ),
        Mutant("upside down", "tl.div_rn(greatest - logit", "tl.div_rn(logit - greatest", DIFFERS),
        Mutant(
            "no least temperature",
            "tl.maximum(temperature, MIN_TEMPERATURE)",
            "temperature",
            DIFFERS,
        ),
        Mutant("depth of the share itself", "0.0 - tl.log(", "1.0 - (", DIFFERS),
        Mutant(
            "a rank's lower end",
            "    return high",
            "    return low",
            DIFFERS,
            within="depth_of_rank",
        ),
        Mutant("a bound for one token", "tl.cast(vocab, tl.float32)", "1.0", DIFFERS),
        Mutant(
            "masses of all",
            PLAIN_MASS,
            "mass = mass_of(depth)",
            DIFFERS,
            within="sample_weigh_kernel",
        ),
        Mutant(
            "candidates of all spans in one place",
            "found = candidates_ptr + place * SPAN",
            "found = candidates_ptr + row * SPAN",
            DoubleStore,
            "store of candidates",
        ),
        Mutant(
            "candidates a place too far",
            "tl.cumsum(is_candidate) - 1",
            "tl.cumsum(is_candidate)",
            DIFFERS,
        ),
        Mutant(
            "the first candidates only",
            "range(0, most, WIDTH)",
            "range(0, WIDTH, WIDTH)",
            DIFFERS,
        ),
        Mutant("the farthest left out", "high), farthest)", "high), farthest - 1)", DIFFERS),
        Mutant("ties cut", "depth <= deepest", "depth < deepest", DIFFERS, within="masses_to"),
        Mutant("one token more", "top_k.to(tl.float64)", "top_k.to(tl.float64) + 1", DIFFERS),
        Mutant("masses before top-k", COUNTED, COUNTED.split("\n")[0] + "\n", DIFFERS),
        Mutant("masses before top-p", WEIGHED, WEIGHED.split("\n")[0] + "\n", DIFFERS),
        Mutant("top-p by number", "target, False, WIDTH", "target, True, WIDTH", DIFFERS),
        Mutant("the highest of equals", "in_group, vocab))", "in_group, -1))", DIFFERS),
        Mutant("the mass before itself", "span == drawn - 1", "span == drawn", DIFFERS),
        Mutant("what is not kept, drawn", PLAIN_MASS + ".to", "mass = mass_of(depth).to", DIFFERS),
        Mutant("a digit of u lost", ">> 11", ">> 12", DIFFERS),
        Mutant(
            "positions from nought", "bitcast=True) + 1) * GAMMA", "bitcast=True)) * GAMMA", DIFFERS
        ),
        Mutant(
            "seeds not mixed",
            "key = mixed(seed.to(tl.uint64, bitcast=True) + GAMMA)",
            "key = seed.to(tl.uint64, bitcast=True) + GAMMA",
            DIFFERS,
        ),
        Mutant(
            "seeds for positions",
            "uniform_of(seed, tl.load(positions_ptr + row))",
            "uniform_of(tl.load(positions_ptr + row), seed)",
            DIFFERS,
        ),
        Mutant("top-k for seeds", "row * 2 + 1", "row * 2", DIFFERS),
        Mutant(
            "min-p for top-p",
            "row * 3 + 2",
            "row * 3 + 1",
            OutOfBounds,
            "load of candidates",
            within="sample_draw_kernel",
        ),
        Mutant(
            "rows of two floats",
            "tl.load(floats_ptr + row * 3)",
            "tl.load(floats_ptr + row * 2)",
            DIFFERS,
            within="sample_draw_kernel",
        ),
        Mutant(
            "one span only",
            "_launch_greatest((spans, rows)",
            "_launch_greatest((1, rows)",
            Uninitialised,
            "of greatest were never stored",
            "api",
        ),
        Mutant(
            "one row only",
            "_launch_draw((rows,)",
            "_launch_draw((1,)",
            Uninitialised,
            "of token_ids were never stored",
            "api",
        ),
        Mutant(
            "groups for spans",
            "*found, *sizes, spans, vocab",
            "*found, *sizes, groups, vocab",
            ContractError,
            "spans must be",
            "api",
        ),
    ]
}
