"""What a step over a tiered cache is told, by hand-made tables, whose columns are 0, 1, 2, ..."""

import numpy as np
import pytest
import torch

from engine.cache.column import Demotion
from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from engine.cache.tiered_span import TieredSpan, View
from engine.execution.tiered_inputs import (
    build_tiered_inputs,
    decoded_slot,
    demoted_blocks,
    in_all_layers,
)
from engine.execution.tiered_pages import PagedPrompts, num_pages_for, page_prompts
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence
from tests.unit.engine.hand_batch import new_sequence

CONFIG = TierConfig(sink_tokens=64, hot_tokens=64, warm_tokens=64, cell_tokens=128)
GROUP = TierGroup(CONFIG, (0, 1, 2), 1000, 500)
CPU = torch.device("cpu")


def view(sink: int, cold: int, warm: int, end: int, factor: int = 1) -> View:
    """Columns 0, 1, 2, ..., of k8v4, times `factor`."""
    num_blocks = [sink // 64, (cold - sink) // 64, (warm - cold) // 64, -(-(end - warm) // 64)]
    keys, values = (
        factor * np.arange(np.dot(num_blocks, slabs), dtype=np.int32)
        for slabs in ([4, 2, 2, 4], [4, 1, 2, 4])
    )
    return View((sink, cold, warm, end), keys, values)


def entry(sequence: Sequence, *spans: TieredSpan) -> ScheduledSequence:
    start, end = spans[0].start, spans[-1].end
    return ScheduledSequence(sequence, start, end - start, spans)


def chunk_of_two_cells() -> tuple[TieredSpan, TieredSpan]:
    """Blocks: sink 0; cold 1; then, from the second cell on, cold 1 to 3."""
    first = TieredSpan(330, 384, False, (view(64, 128, 128, 384),))
    second = TieredSpan(384, 400, False, (view(64, 256, 256, 400, factor=100),))
    return first, second


def test_rows_of_decodes_come_first_and_samples_in_the_order_of_the_batch() -> None:
    prompt = new_sequence(list(range(400)), [])
    decoding = new_sequence([7] * 130, [])
    decoding.token_ids.append(99)
    warm_up = new_sequence([1, 2], [], SamplingParams(max_tokens=0))
    batch = ScheduledBatch(
        (
            entry(prompt, *chunk_of_two_cells()),
            entry(warm_up, TieredSpan(0, 2, False, (view(0, 0, 0, 2),))),
            entry(decoding, TieredSpan(130, 131, True, (view(64, 64, 64, 131),))),
        )
    )

    inputs = build_tiered_inputs(batch, [GROUP], 100, CPU)

    assert inputs.input_ids.tolist() == [99, *range(330, 400), 1, 2]
    assert inputs.positions.tolist() == [130, *range(330, 400), 0, 1]
    assert inputs.sampled_rows.tolist() == [70, 0]
    (group,) = inputs.groups
    assert group.demotions == ()
    assert group.decodes is not None
    assert group.decodes.bounds.tolist() == [[64, 64, 64, 131]]
    assert group.decodes.key_tables.tolist() == [list(range(12))]
    (prompts,) = group.prompts
    assert prompts.rows.rows == slice(1, 73)


def test_new_tokens_go_to_the_last_slabs_of_their_column() -> None:
    prompt = new_sequence(list(range(400)), [])
    batch = ScheduledBatch((entry(prompt, *chunk_of_two_cells()),))

    (group,) = build_tiered_inputs(batch, [GROUP], 100, CPU).groups

    # Keys: 4 slabs of the sink, 2 of a cold block, 4 of each of blocks 2 to 5, in which 330 is in
    # slab 0 of the last; then three cold blocks, and position 384 begins block 6.
    first = 4 + 2 + 4 * 3
    expected = [(first + (p - 320) // 16) * 16 + p % 16 for p in range(330, 384)]
    expected += [100 * (4 + 3 * 2 + 4 * 2) * 16 + p % 16 for p in range(384, 400)]
    assert group.key_slots.tolist() == expected
    first = 4 + 1 + 4 * 3
    expected = [(first + (p - 320) // 16) * 16 + p % 16 for p in range(330, 384)]
    expected += [100 * (4 + 3 + 4 * 2) * 16 + p % 16 for p in range(384, 400)]
    assert group.value_slots.tolist() == expected


def test_where_a_decoded_token_goes() -> None:
    seen = view(64, 128, 192, 340)
    span = TieredSpan(339, 340, True, (seen,))
    assert decoded_slot(span, seen, Part.KEYS) == (4 + 2 + 2 + 4 * 2 + 1) * 16 + 339 % 16
    assert decoded_slot(span, seen, Part.VALUES) == (4 + 1 + 2 + 4 * 2 + 1) * 16 + 339 % 16


def sources_of(prompts: PagedPrompts) -> dict[tuple[Part, Format, int], list[int]]:
    """By part, format and page."""
    return {
        (each.part, each.source_format, page): slabs
        for each in prompts.restored
        for page, slabs in zip(each.pages.tolist(), each.sources.tolist(), strict=True)
    }


def test_a_block_demoted_between_two_cells_is_there_as_both_see_it() -> None:
    (prompts,) = page_prompts([chunk_of_two_cells()], 0, CONFIG, 100, 5)

    # Pages 0 to 3: sink and cold as the second cell has them. 4 to 7: hot to the first, blocks 2 to
    # 5; page 8: block 6, hot to the second.
    assert prompts.rows.block_tables.tolist() == [[0, 1, 4, 5, 6, 7, 0], [0, 1, 2, 3, 6, 7, 8]]
    assert prompts.rows.context_lens.tolist() == [384, 400]
    assert prompts.rows.query_starts.tolist() == [0, 54, 70]
    assert (prompts.rows.rows, prompts.rows.query_lens) == (slice(5, 75), (54, 16))
    assert prompts.tails.tolist() == [8 * 64 + token for token in range(16, 64)]
    keys = {place[1:]: s for place, s in sources_of(prompts).items() if place[0] is Part.KEYS}
    assert keys == {
        (Format.BF16, 0): [0, 100, 200, 300],
        (Format.INT8, 1): [400, 500],
        (Format.INT8, 2): [600, 700],
        (Format.INT8, 3): [800, 900],
        **{(Format.BF16, 4 + n): [6 + 4 * n + nth for nth in range(4)] for n in range(4)},
        (Format.BF16, 8): [1800, 1900, 2000, 2100],
    }
    values = sources_of(prompts)
    assert values[Part.VALUES, Format.INT4, 3] == [600]
    assert values[Part.VALUES, Format.BF16, 4] == [5, 6, 7, 8]
    assert len(values) == 2 * 9


def test_warm_blocks_are_restored_from_their_own_format() -> None:
    span = TieredSpan(320, 330, False, (view(64, 128, 256, 330),))
    (prompts,) = page_prompts([(span,)], 0, CONFIG, 100, 0)
    sources = sources_of(prompts)
    assert sources[Part.VALUES, Format.INT4, 1] == [4]
    assert sources[Part.VALUES, Format.INT8, 2] == [5, 6]
    assert sources[Part.VALUES, Format.INT8, 3] == [7, 8]
    assert prompts.rows.block_tables.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_prompt_that_is_all_sink() -> None:
    span = TieredSpan(10, 64, False, (view(64, 64, 64, 64),))
    (prompts,) = page_prompts([(span,)], 0, CONFIG, 1, 0)
    assert prompts.rows.block_tables.tolist() == [[0]]
    assert prompts.tails.tolist() == []
    assert sources_of(prompts)[Part.VALUES, Format.BF16, 0] == [0, 1, 2, 3]


def test_chunks_that_do_not_fit_together_come_one_after_the_other() -> None:
    small = TieredSpan(0, 20, False, (view(0, 0, 0, 20),))
    chunks = [(small,), chunk_of_two_cells(), (small,), (small,)]
    first, second = page_prompts(chunks, 0, CONFIG, 10, 0)
    assert first.rows.rows == slice(0, 90)
    assert first.rows.block_tables[:, 0].tolist() == [0, 1, 1]
    assert second.rows.rows == slice(90, 130)
    assert second.rows.block_tables.tolist() == [[0], [1]]
    assert len(page_prompts(chunks, 0, CONFIG, 12, 0)) == 1


@pytest.mark.parametrize("config", [CONFIG, TierConfig()])
@pytest.mark.parametrize("num_tokens", [1, 100, 512, 1000])
def test_as_many_pages_as_any_chunk_needs(config: TierConfig, num_tokens: int) -> None:
    num_pages = num_pages_for(config, 2000, num_tokens)
    for start in range(2000 - num_tokens + 1):
        end = start + num_tokens
        first, last = (config.prefill_ages(each).hot_start for each in (start, end - 1))
        assert -(-end // 64) + last - first <= num_pages


def test_demotions_alike_are_made_together_and_those_from_bf16_first() -> None:
    def demotion(part: Part, source: Format, target: Format, first: int) -> Demotion:
        def slabs(of: Format, at: int) -> np.ndarray:
            return at + np.arange(of.num_slabs, dtype=np.int32)[None]

        return Demotion(part, source, target, slabs(source, first), slabs(target, first + 50))

    made = demoted_blocks(
        [
            demotion(Part.KEYS, Format.INT8, Format.INT4, 8),
            demotion(Part.VALUES, Format.BF16, Format.INT8, 16),
            demotion(Part.KEYS, Format.BF16, Format.INT8, 20),
            demotion(Part.VALUES, Format.BF16, Format.INT8, 24),
        ]
    )

    kinds = [(each.part, each.source_format, each.target_format) for each in made]
    assert kinds == [
        (Part.KEYS, Format.BF16, Format.INT8),
        (Part.VALUES, Format.BF16, Format.INT8),
        (Part.KEYS, Format.INT8, Format.INT4),
    ]
    assert made[1].sources.tolist() == [[16, 17, 18, 19], [24, 25, 26, 27]]
    assert made[1].targets.tolist() == [[66, 67], [74, 75]]

    everywhere = in_all_layers(made[1], GROUP)
    assert everywhere.sources[:, 0].tolist() == [16, 24, 516, 524, 1016, 1024]
    assert everywhere.targets[4].tolist() == [1066, 1067]
    assert in_all_layers(made[0], GROUP).sources[1].tolist() == [1020, 1021, 1022, 1023]
