"""The tables of decoding sequences on the device: what the plan says, and little is uploaded."""

import pytest
import torch

from engine.cache.formats import Part
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from engine.execution import tiered_slots
from engine.execution.tiered_inputs import table_width
from engine.execution.tiered_slots import TieredSlots
from engine.execution.uploads import upload_together
from engine.scheduling.batch import ScheduledBatch
from engine.sequence import Sequence, SequenceStatus
from tests.unit.engine.tiered_plans import TieredPlans

CPU = torch.device("cpu")
TIERS = {"sink_tokens": 64, "hot_tokens": 64, "warm_tokens": 64, "cell_tokens": 128}
CONFIGS = [TierConfig(**TIERS, cold_format=name) for name in ("k8v4", "int4")]
GROUPS = [TierGroup(config, (layer,), 300, 300) for layer, config in enumerate(CONFIGS)]
MAX_MODEL_LEN = 700


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Table entries of each upload."""
    sizes = []

    def spy(tree: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
        sizes.append(len(tree[1]))
        return upload_together(tree, device)

    monkeypatch.setattr(tiered_slots, "upload_together", spy)
    return sizes


@pytest.fixture
def slots() -> TieredSlots:
    return TieredSlots(2, CONFIGS, MAX_MODEL_LEN, CPU)


def opened(plans: TieredPlans, num_tokens: int, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    return plans.open(torch.randint(199, (num_tokens,), generator=generator).tolist())


def prefilled(plans: TieredPlans, num_tokens: int, seed: int = 0) -> Sequence:
    sequence = opened(plans, num_tokens, seed)
    plans.book(plans.plan((sequence, num_tokens)))
    return sequence


def decode(plans: TieredPlans, *sequences: Sequence) -> ScheduledBatch:
    for each in sequences:
        each.token_ids.append(len(each.token_ids) % 199)
    batch = plans.plan(*((each, 1) for each in sequences))
    plans.book(batch)
    return batch


def assert_placed(slots: TieredSlots, batch: ScheduledBatch) -> list[int]:
    placed = slots.place(batch.scheduled)
    for entry, slot in zip(batch.scheduled, placed, strict=True):
        for view, tables in zip(entry.spans[0].views, slots.tables, strict=True):
            for part in Part:
                column = view.slabs(part)
                assert tables[part][slot, : len(column)].tolist() == column.tolist()
    return placed


def test_tables_are_those_of_the_plan_and_as_wide_as_they_get(slots: TieredSlots) -> None:
    plans = TieredPlans(GROUPS)
    first, second = prefilled(plans, 650), prefilled(plans, 100, seed=1)
    for _ in range(MAX_MODEL_LEN - 650):
        batch = decode(plans, first, second)
        assert_placed(slots, batch)
    for view, tables in zip(batch.scheduled[0].spans[0].views, slots.tables, strict=True):
        widths = [tables[part].shape[1] for part in Part]
        assert widths == [table_width(len(view.slabs(part))) for part in Part]


def test_only_what_changes_is_uploaded(slots: TieredSlots, uploaded: list[int]) -> None:
    plans = TieredPlans(GROUPS)
    sequence = prefilled(plans, 500)
    batch = decode(plans, sequence)
    slots.place(batch.scheduled)
    whole = sum(
        len(view.slabs(part)) for view in batch.scheduled[0].spans[0].views for part in Part
    )
    assert uploaded == [whole]

    for _ in range(64):
        slots.place(decode(plans, sequence).scheduled)
    # Once, at the border of a block: 3 blocks have other slabs, one is new.
    assert len(uploaded) == 2
    assert uploaded[1] <= 4 * (2 + 2 + 4 + 4)


def test_prompts_have_slots_and_no_tables(slots: TieredSlots, uploaded: list[int]) -> None:
    plans = TieredPlans(GROUPS)
    decoding = prefilled(plans, 100)
    prompt = opened(plans, 200, seed=1)
    decoding.token_ids.append(5)
    batch = plans.plan((prompt, 200), (decoding, 1))
    first, second = slots.place(batch.scheduled)
    assert first != second
    assert len(uploaded) == 1
    assert not any(table[first].any() for tables in slots.tables for table in tables)


def test_a_slot_is_given_on_with_nothing_of_its_last_owner(slots: TieredSlots) -> None:
    plans = TieredPlans(GROUPS)
    first = prefilled(plans, 300)
    (slot,) = assert_placed(slots, decode(plans, first))
    other = prefilled(plans, 200, seed=1)
    assert_placed(slots, decode(plans, other))
    plans.close(first)
    third = prefilled(plans, 250, seed=2)
    assert assert_placed(slots, decode(plans, third)) == [slot]


def test_a_sequence_that_gave_its_slot_up_is_written_anew(slots: TieredSlots) -> None:
    plans = TieredPlans(GROUPS)
    first, second = prefilled(plans, 300), prefilled(plans, 200, seed=1)
    (slot,) = assert_placed(slots, decode(plans, first))
    first.status = SequenceStatus.WAITING
    assert assert_placed(slots, decode(plans, second)) == [slot]
    plans.close(second)
    first.status = SequenceStatus.RUNNING
    assert assert_placed(slots, decode(plans, first)) == [slot]


def test_a_sequence_that_was_preempted_has_other_slabs(slots: TieredSlots) -> None:
    plans = TieredPlans(GROUPS)
    sequence = prefilled(plans, 300)
    assert_placed(slots, decode(plans, sequence))
    # It waits and comes back between two steps that it has a part in.
    for table in plans.tenures.pop(sequence).tables:
        table.close()
    prefilled(plans, 200, seed=1)
    plans.tenures[sequence] = plans.tenures.pop(prefilled(plans, 301))
    assert_placed(slots, decode(plans, sequence))
