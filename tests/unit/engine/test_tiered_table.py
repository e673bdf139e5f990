"""Tokens age, blocks are demoted, tables swap entries: the same however the work was cut."""

import random

import numpy as np
import pytest

from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig
from engine.errors import ArenaExhausted, IntegrityError
from tests.fakes.tiered_sequences import TieredSequence, TieredSequences

PROMPT = random.Random(7).choices(range(50_000), k=2_600)
COLD_FORMATS = ["k8v4", "int4", "int8"]


def pool_for(config: TierConfig, num_slabs: int = 1_000) -> TieredSequences:
    return TieredSequences(num_slabs, num_slabs, config)


def entries(pool: TieredSequences, sequence: TieredSequence) -> list[tuple[object, ...]]:
    """Format and address of every block's keys and values."""
    found = []
    for part in Part:
        arena = pool.arenas.of(part)
        for index, block in enumerate(sequence.table.blocks(part)):
            found.append((part, index, arena.format_of(block), arena.address_of(block)))
    return found


def stored(config: TierConfig, chunks: list[int], num_prompt_tokens: int, num_tokens: int):
    pool = pool_for(config)
    sequence = pool.open(PROMPT[:num_prompt_tokens])
    spans = [span for chunk in chunks for span in pool.prefill(sequence, chunk)]
    assert sequence.num_left == 0
    sequence.append(PROMPT[num_prompt_tokens:num_tokens])
    pool.decode(sequence, num_tokens - num_prompt_tokens)
    pool.check()
    return pool, sequence, spans


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
@pytest.mark.parametrize("num_prompt_tokens", [1, 64, 500, 1_090, 2_048, 2_600])
def test_any_chunking_gives_the_same_blocks(cold_format: str, num_prompt_tokens: int) -> None:
    config, chosen = TierConfig(cold_format=cold_format), random.Random(num_prompt_tokens)
    pool, whole, _ = stored(config, [num_prompt_tokens], num_prompt_tokens, num_prompt_tokens)
    expected = entries(pool, whole)
    assert any(entry[3] is not None for entry in expected) == (num_prompt_tokens >= 64)
    for longest in (40, 64, 300, 2_000):
        chunks, left = [], num_prompt_tokens
        while left:
            chunks.append(min(left, chosen.randint(1, longest)))
            left -= chunks[-1]
        pool, cut, spans = stored(config, chunks, num_prompt_tokens, num_prompt_tokens)
        assert entries(pool, cut) == expected
        assert cut.contents == whole.contents
        for span in spans:
            assert span.start // 512 == (span.end - 1) // 512
            assert span.ages == config.prefill_ages(span.start)
        assert [span.start for span in spans][1:] == [span.end for span in spans][:-1]


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
def test_decode_ages_what_prefill_left(cold_format: str) -> None:
    config = TierConfig(cold_format=cold_format)
    _, sequence, _ = stored(config, [700, 600], 1_300, 2_500)
    ages = config.decode_ages(2_499)
    assert sequence.table.ages == ages
    assert (ages.warm_start, ages.hot_start) == (29, 37)
    for part in Part:
        slabs = sequence.table.slab_ids(part)
        assert len(slabs) == len(set(slabs.tolist())) == config.num_slabs(ages, 2_500, part)


def test_keys_of_k8v4_grow_cold_without_a_copy() -> None:
    """They are INT8 when warm already; only values are rounded once more."""
    config = TierConfig()
    pool = pool_for(config)
    sequence = pool.open(PROMPT)
    spans = pool.prefill(sequence, 640)
    spans += [
        span
        for position in range(640, 1_000)
        for epoch in [pool.arenas.epochs.begin()]
        for span in [pool.memory.extend(sequence, sequence.table.extend_decode)]
    ]
    kinds = {
        (demotion.part, demotion.source_format, demotion.target_format)
        for span in spans
        for demotion in span.demotions
    }
    assert kinds == {
        (Part.KEYS, Format.BF16, Format.INT8),
        (Part.VALUES, Format.BF16, Format.INT8),
        (Part.VALUES, Format.INT8, Format.INT4),
    }


def test_a_decode_step_changes_the_table_at_block_borders_only() -> None:
    pool = pool_for(TierConfig(cold_format="int4"))
    sequence = pool.open(PROMPT)
    pool.prefill(sequence, 1_000)
    before = {part: sequence.table.slab_ids(part).tolist() for part in Part}
    for position in range(1_000, 1_300):
        pool.arenas.epochs.begin()
        span = pool.memory.extend(sequence, sequence.table.extend_decode)
        config = pool.config
        num_kept = {
            part: sum(
                config.format_at(span.ages, block)[part].num_slabs
                for block in range(span.first_changed_block)
            )
            for part in Part
        }
        after = {part: sequence.table.slab_ids(part).tolist() for part in Part}
        for part in Part:
            assert after[part][: num_kept[part]] == before[part][: num_kept[part]]
        is_border = position % 64 == 0 or position == 1_000
        assert (after != before) == is_border
        before = after


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
def test_a_column_has_the_slabs_that_its_bounds_count(cold_format: str) -> None:
    config = TierConfig(cold_format=cold_format)
    pool = pool_for(config)
    sequence = pool.open(PROMPT)
    bounds = []
    for num_tokens in (40, 30, 900, 700):
        pool.prefill(sequence, num_tokens)
        bounds.append(sequence.table.bounds)
    pool.decode(sequence, 3)
    bounds.append(sequence.table.bounds)
    assert bounds == [
        (0, 0, 0, 40),
        (64, 64, 64, 70),
        (64, 64, 64, 970),
        (64, 896, 896, 1_670),
        (64, 1_024, 1_536, 1_673),
    ]
    sink, cold, warm, length = bounds[-1]
    for part in Part:
        tokens_of_a_slab = 64 // config.cold[part].num_slabs
        assert len(sequence.table.slab_ids(part)) == (
            sink // 16
            + (cold - sink) // tokens_of_a_slab
            + (warm - cold) // 32
            + 4 * -(-(length - warm) // 64)
        )


def test_the_second_sharer_finds_the_canonical_copy() -> None:
    """Each swaps its own entry; the block both had stays cached in bf16."""
    pool = pool_for(TierConfig(cold_format="int4"))
    first = pool.open(PROMPT[:1_000])
    pool.prefill(first, 1_000)
    second = pool.open(PROMPT[:900] + [1, 2, 3] * 200)
    assert second.table.num_blocks == 900 // 64
    assert second.table.blocks(Part.KEYS) == first.table.blocks(Part.KEYS)[:14]
    shared = first.table.blocks(Part.KEYS)[1]
    first.append(PROMPT[1_000:1_100])
    pool.prefill(first, 100)  # the cell of 1,024 begins: blocks 1 to 5 grow cold
    assert second.table.blocks(Part.KEYS)[1] == shared
    num_copied = pool.memory.num_blocks_copied
    assert num_copied == 2 * 5
    pool.prefill(second, 600)
    assert second.table.num_tokens > 1_024
    assert pool.memory.num_blocks_copied == num_copied
    for part in Part:
        assert second.table.blocks(part)[:6] == first.table.blocks(part)[:6]
    address = pool.arenas.keys.address_of(shared)
    assert address is not None
    assert pool.arenas.keys.find(address) == shared
    pool.check()


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
def test_a_sequence_that_lost_its_table_decodes_on(cold_format: str) -> None:
    pool, sequence, _ = stored(TierConfig(cold_format=cold_format), [1_300], 1_300, 2_500)
    expected = {part: sequence.contents[part][:39] for part in Part}
    pool.close(sequence)
    pool.check()
    again = pool.resume(sequence)
    assert again is not None
    assert again.table.num_tokens == 39 * 64
    assert again.contents == expected
    pool.decode(again, 100)
    pool.check()


def test_what_decode_made_is_never_taken_for_what_prefill_makes() -> None:
    pool, sequence, _ = stored(TierConfig(), [700], 700, 1_500)
    pool.close(sequence)
    as_prompt = pool.open(PROMPT[:1_500])
    assert as_prompt.table.num_blocks == 700 // 64
    assert pool.open(PROMPT[:1_500], tenant=b"theirs").table.num_blocks == 0


def test_a_hit_needs_the_formats_that_its_next_token_sees() -> None:
    """Cold blocks are there, but the bf16 ones of the cell before are not: begin before them."""
    pool, sequence, _ = stored(TierConfig(cold_format="int4"), [2_048], 2_048, 2_048)
    # All but the last: it ends a cell, and nobody has demoted what the next cell sees as cold.
    assert pool.open(PROMPT[:2_300]).table.num_blocks == 31
    blocks = sequence.table.blocks(Part.KEYS)
    lost = pool.arenas.keys.address_of(blocks[25])
    assert lost is not None
    del pool.arenas.keys._block_of[lost]
    # Cell 3 begins at block 24 and sees bf16 from 14 on; up to 25 all is there.
    assert pool.open(PROMPT[:2_300]).table.num_blocks == 25


def test_too_little_room_changes_nothing() -> None:
    pool = TieredSequences(80, 60, TierConfig(cold_format="int4"))
    sequence = pool.open(PROMPT)
    pool.prefill(sequence, 900)
    before = sequence.table.slab_ids(Part.KEYS).tolist()
    pool.arenas.epochs.begin()
    with pytest.raises(ArenaExhausted, match="4 slabs of values are needed, 0 of 60 can be had"):
        sequence.table.extend_prefill(200)
    assert sequence.table.num_tokens == 900
    assert sequence.table.slab_ids(Part.KEYS).tolist() == before
    pool.check()


def test_exact_keys_and_values_lie_in_lockstep_as_pages_of_sixteen() -> None:
    """So that one table serves both, whatever came and went before."""
    pool, chosen = pool_for(TierConfig(exact=True)), random.Random(3)
    for _ in range(40):
        sequence = pool.open(PROMPT[: chosen.randint(1, 900)])
        pool.prefill(sequence, chosen.randint(1, 900))
        pool.decode(sequence, 70)
        keys, values = (sequence.table.slab_ids(part) for part in Part)
        assert (keys == values).all()
        assert (keys.reshape(-1, 4) == keys[::4, None] + np.arange(4)).all()
        if len(pool.open_ones) > 3:
            pool.close(chosen.choice(pool.open_ones))
    pool.check()


def test_an_abort_gives_all_back() -> None:
    pool = pool_for(TierConfig())
    sequence = pool.open(PROMPT)
    pool.prefill(sequence, 1_500)
    epoch = pool.arenas.epochs.begin()
    pool.plan_prefill(sequence, 500)
    pool.close(sequence)
    pool.check()
    assert pool.arenas.keys.num_unreferenced_slabs == pool.arenas.keys.num_slabs
    assert pool.arenas.keys.num_available_slabs < pool.arenas.keys.num_slabs
    pool.arenas.epochs.finish(epoch)
    assert pool.arenas.keys.num_available_slabs == pool.arenas.keys.num_slabs


def test_what_cannot_be_is_refused() -> None:
    pool = pool_for(TierConfig())
    sequence = pool.open(PROMPT)
    with pytest.raises(IntegrityError, match="outside a step"):
        sequence.table.extend_prefill(1)
    pool.arenas.epochs.begin()
    sequence.table.extend_prefill(10)
    sequence.table.extend_decode()
    with pytest.raises(IntegrityError, match="prefill at 11 of a sequence that has decoded"):
        sequence.table.extend_prefill(1)


def test_an_entry_of_another_format_or_of_other_tokens_is_named() -> None:
    pool = pool_for(TierConfig(cold_format="int4"))
    sequence = pool.open(PROMPT)
    pool.prefill(sequence, 1_100)
    column = sequence.table._columns[Part.KEYS]
    column.blocks[1], column.blocks[9] = column.blocks[9], column.blocks[1]
    with pytest.raises(IntegrityError, match="of keys is BF16, entry 1 should be INT4"):
        pool.check()
    column.blocks[1], column.blocks[2], column.blocks[9] = (
        column.blocks[2],
        column.blocks[9],
        column.blocks[1],
    )
    with pytest.raises(IntegrityError, match=r"entry 1 reads block .*, which holds other"):
        pool.check()
