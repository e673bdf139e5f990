"""Decodes over tiers that leave out the values of cold blocks: what they certify is so, whatever
came before; and without an epsilon nothing of it is there."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.tier_config import TierConfig
from engine.execution.skipping_decodes import SkippingDecodes
from engine.execution.stored_keys import TieredKeys
from engine.execution.tiered_skips import GroupSkips, SkipRows, SkipsShape
from engine.outputs import SkipCounts
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence
from kernels.checked_interpreter import checked
from kernels.launch import launching
from kernels.tiered_decode.reference import dequantised
from tests.unit.engine.hand_batch import GREEDY
from tests.unit.engine.test_tiered_attention import (
    COS,
    HEADS,
    KV_HEADS,
    LAYERS,
    MAX_TOKENS,
    SCALE,
    SIN,
    SMALL,
    TABLES,
    Steps,
    text,
)

EPSILON = 0.3  # of queries whose softmax is wide
NUM_ROWS = 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class SkippingSteps(Steps):
    """`certified`: the greatest share of each step that was, by layer, and what truly was left out
    of the cache as it is stored."""

    def __init__(self, config: TierConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, dtype=dtype)
        lengths = torch.stack([key.norm(dim=-1).amax(0) * 1.01 for _, key, _ in TABLES])
        self.skipping = SkippingDecodes(self.kv, HEADS, SCALE, lengths, NUM_ROWS, MAX_TOKENS)
        self.backend.skipping = self.skipping
        self.num_left_out = 0

    def step(self, *chunks: tuple[Sequence, int]) -> ScheduledBatch:
        batch = super().step(*chunks)
        if all(entry.spans[0].is_decode for entry in batch.scheduled):
            for row, entry in enumerate(batch.scheduled):
                self._assert_certified(row, entry)
        return batch

    def _assert_certified(self, row: int, entry: ScheduledSequence) -> None:
        """And how far the result is from the whole attention, as the certificate has it."""
        stored = TieredKeys(self.kv)
        at = slice(entry.start, entry.start + 1)
        cos, sin = COS[at].to(self.dtype), SIN[at].to(self.dtype)
        for layer in range(len(LAYERS)):
            number, nth = self.kv.group_of[layer], self.skipping._nth[layer]
            newest = self.skipping._newest[number]
            epsilons = newest.certificates[nth, row]
            assert epsilons.max() <= EPSILON
            token = torch.tensor(entry.new_token_ids)
            query = stored.turned(TABLES[layer][0][token].to(self.dtype), cos, sin)[0].double()
            keys = stored.read(layer, entry)
            scores = torch.einsum("kgd,ktd->kgt", query.unflatten(0, (KV_HEADS, -1)), keys) * SCALE
            left_out = newest.left_out[nth, row].bool()
            view = entry.spans[0].views[number]
            sink = view.bounds[0]
            is_left = torch.zeros(KV_HEADS, keys.shape[1], dtype=torch.bool)
            spread = left_out.repeat_interleave(64, 1)[:, : keys.shape[1] - sink]
            is_left[:, sink : sink + spread.shape[1]] = spread
            weights = scores.softmax(-1)
            true = (weights * is_left[:, None]).sum(-1).flatten()
            assert (true <= epsilons.double() + 1e-12).all()
            self.num_left_out += int(left_out.sum())
            formats = self.skipping._formats[number]
            slabs = torch.from_numpy(view.value_slabs)
            values = dequantised(
                self.kv.layers[layer], slabs, [*view.bounds], formats, is_keys=False
            )
            whole = torch.einsum("kgt,ktd->kgd", weights, values).flatten(0, 1)
            came = self.attended[entry.sequence][layer][-1].double().view(HEADS, -1)
            lengths = (values.norm(dim=-1) * is_left).amax(1).repeat_interleave(HEADS // KV_HEADS)
            most = epsilons.double() * (lengths + came.norm(dim=-1))
            rounding = (1e-5 if self.dtype == torch.float32 else 2e-2) * whole.norm(dim=-1)
            assert ((came - whole).norm(dim=-1) <= most + rounding).all()


def skipping(epsilon: float = EPSILON) -> TierConfig:
    return replace(SMALL, skip_epsilon=epsilon)


def test_what_is_certified_is_so() -> None:
    """Through blocks that get cold meanwhile, in layers of three formats."""
    steps = SkippingSteps(skipping())
    sequence = steps.open(text(460))
    steps.prefill(sequence, [200, 260])
    steps.decode(sequence, text(70, seed=1))
    assert steps.num_left_out > 200
    for _ in "12":
        steps.skipping.counter.read()
    counts = steps.skipping.counter.latest
    assert counts.cold_blocks - counts.read_blocks == steps.num_left_out
    assert 0 < counts.heads_again < counts.heads
    assert 0 < counts.certificates < EPSILON * counts.queries
    assert 0 < counts.greatest_certificate <= EPSILON


def test_of_next_to_nothing_it_is_the_whole_attention() -> None:
    attended = []
    for steps in (Steps(SMALL), SkippingSteps(skipping(1e-12))):
        sequence = steps.open(text(460))
        steps.prefill(sequence, [460])
        steps.decode(sequence, text(20, seed=1))
        attended.append([torch.cat(each) for each in steps.attended[sequence]])
    assert all(map(torch.equal, *attended))


def test_others_come_and_go_and_share() -> None:
    """Rows change hands; a prefix is another's; steps with prompts lie between, which do not
    skip, and demote."""
    steps = SkippingSteps(skipping())
    first = steps.open(text(460))
    steps.prefill(first, [460])
    steps.decode(first, text(6, seed=1))
    second = steps.open(text(460)[:400] + text(50, seed=2))
    assert second.num_computed_tokens == 384
    for token_id in text(2, seed=3):
        first.token_ids.append(token_id)
        steps.step((second, 33), (first, 1))

    def decode(*sequences: Sequence, times: int = 4) -> None:
        for token_id in text(times, seed=9):
            for sequence in sequences:
                sequence.token_ids.append(token_id)
            steps.step(*((sequence, 1) for sequence in sequences))

    decode(second, first)
    decode(first, second)
    decode(second)
    steps.plans.close(first)
    third = steps.open(text(500, seed=4))
    steps.prefill(third, [500])
    decode(third, second)
    third.num_preemptions += 1
    decode(third, second, times=1)
    assert steps.num_left_out > 50


def test_by_the_kernels_it_is_certified_too() -> None:
    steps = SkippingSteps(skipping(), dtype=torch.bfloat16)
    sequence = steps.open(text(262))
    steps.prefill(sequence, [262])
    with checked():
        steps.decode(sequence, text(2, seed=5))
    assert steps.num_left_out > 0


def test_all_that_a_step_reads_stays_where_it_is() -> None:
    steps = SkippingSteps(skipping())
    first, second = steps.open(text(300)), steps.open(text(300, seed=2))
    places = []
    for sequences in ([first], [first, second], [second], [second, first]):
        for sequence in sequences:
            steps.prefill(sequence, [300][sequence.num_computed_tokens // 300 :])
            sequence.token_ids.append(5)
        steps.step(*((sequence, 1) for sequence in sequences))
        newest = steps.skipping._newest[0]
        places.append([each.data_ptr() for each in (newest.skips, newest.masses, newest.lse)])
        assert newest.skips.shape[1] == len(sequences)
    assert all(each == places[0] for each in places)


@pytest.mark.parametrize("is_skipping", [False, True])
def test_no_plan_is_made_right_before_it_is_read(is_skipping: bool) -> None:
    """By programs that may start while the kernel before them still runs."""
    kind, config = (SkippingSteps, skipping()) if is_skipping else (Steps, SMALL)
    steps = kind(config, dtype=torch.bfloat16)
    sequence = steps.open(text(300))
    steps.prefill(sequence, [300])
    sequence.token_ids.append(7)
    launched: list[str] = []
    with launching(lambda launcher, *_: launched.append(launcher.contract.kernel)):
        Steps.step(steps, (sequence, 1))
    reads = "tiered_skip" if is_skipping else "tiered_decode"
    before = {launched[place - 1] for place, name in enumerate(launched) if name == reads}
    assert "tiered_plan" in launched
    assert before
    assert "tiered_plan" not in before


SHAPE = SkipsShape(num_layers=2, num_kv_heads=2, group=1, blocks=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=8))
def test_lists_move_with_their_sequences(steps: list[list[int]]) -> None:
    group = GroupSkips(SHAPE, 6, torch.zeros(2, 2))
    rows = SkipRows([group])
    sequences = [Sequence(f"s{nth}", [1], 1, GREEDY) for nth in range(6)]
    expected: dict[int, torch.Tensor] = {}
    for number, step in enumerate(steps, 1):
        size = len(step) + number % 3
        rows.arrange([sequences[each] for each in step], size)
        skips = group.begin(torch.zeros(size, 4, dtype=torch.int32)).skips
        empty = torch.zeros_like(skips[:, 0])
        for row in range(size):
            mine = expected.get(step[row], empty) if row < len(step) else empty
            assert torch.equal(skips[:, row], mine)
        skips[:, : len(step)] = torch.arange(len(step))[:, None, None] + 10 * number
        expected = {each: skips[:, row].clone() for row, each in enumerate(step)}


def test_nothing_is_counted_before_it_has_come() -> None:
    steps = SkippingSteps(skipping())
    assert steps.skipping.counter.latest == SkipCounts()
    assert steps.skipping.num_bytes == sum(
        SkipsShape.of(group.config, group.num_layers, (HEADS, KV_HEADS), MAX_TOKENS).num_bytes(4)
        for group in steps.kv.groups
    )
