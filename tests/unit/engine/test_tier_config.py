"""Which format a token has: the design's numbers, by position alone."""

import pytest

from engine.cache.formats import HOT, WARM, BlockFormat, Format, Part
from engine.cache.tier_config import Ages, TierConfig

K8V4 = BlockFormat(Format.INT8, Format.INT4)


def formats(config: TierConfig, ages: Ages, num_blocks: int) -> list[BlockFormat]:
    return [config.format_at(ages, block) for block in range(num_blocks)]


@pytest.mark.parametrize(
    ("position", "num_cold", "num_warm", "num_hot"),
    [
        (0, 0, 0, 0),
        (63, 0, 0, 0),
        (191, 0, 0, 1),
        (192, 0, 0, 2),
        (255, 0, 0, 2),
        (256, 0, 1, 2),  # block 1 is behind 128 tokens and more
        (704, 0, 8, 2),
        (767, 0, 8, 2),
        (768, 1, 8, 2),
        (65_536, 1013, 8, 2),
    ],
)
def test_decode_ages_by_whole_blocks(
    position: int, num_cold: int, num_warm: int, num_hot: int
) -> None:
    config = TierConfig()
    num_blocks = position // 64
    found = formats(config, config.decode_ages(position), num_blocks)
    expected = [HOT] * min(1, num_blocks) + [K8V4] * num_cold + [WARM] * num_warm + [HOT] * num_hot
    assert found == expected


@pytest.mark.parametrize(
    ("position", "num_cold"),
    [(0, 0), (1023, 0), (1151, 5), (1024, 5), (1535, 5), (1536, 13), (65_535, 1005)],
)
def test_a_prompt_token_sees_bf16_from_640_before_its_cell_on(position: int, num_cold: int) -> None:
    config = TierConfig()
    ages = config.prefill_ages(position)
    own_block = position // 64
    found = formats(config, ages, own_block)
    assert found == ([HOT] + [K8V4] * num_cold + [HOT] * own_block)[:own_block]
    cell_start = position // 512 * 512
    assert ages.hot_start * 64 <= max(64, cell_start - 640)


def test_a_decoded_token_sees_128_to_191_tokens_in_bf16_behind_it() -> None:
    config = TierConfig()
    for position in range(1024, 1024 + 192):
        assert 128 <= position - 64 * config.decode_ages(position).hot_start <= 191


def test_runs_never_move_back_while_a_sequence_grows() -> None:
    config = TierConfig()
    for num_prompt_tokens in range(0, 3_000, 37):
        ages = [config.prefill_ages(p) for p in range(0, num_prompt_tokens, 64)]
        ages += [config.decode_ages(p) for p in range(num_prompt_tokens, num_prompt_tokens + 900)]
        for field in ("cold_start", "warm_start", "hot_start"):
            starts = [getattr(each, field) for each in ages]
            assert starts == sorted(starts)


def test_runs_are_contiguous_and_say_the_same_as_the_age_of_each_block() -> None:
    config = TierConfig(cold_format="int4")
    for position in (0, 63, 64, 200, 640, 1100, 5_000):
        for ages in (config.decode_ages(position), config.prefill_ages(position)):
            for num_blocks in (0, 1, 2, position // 64 + 1):
                in_runs = [
                    run_format
                    for start, end, run_format in config.runs(ages, num_blocks)
                    for _ in range(start, end)
                ]
                assert in_runs == formats(config, ages, num_blocks)


def test_slabs_of_a_long_sequence() -> None:
    config = TierConfig()
    ages = config.decode_ages(65_536)
    assert config.num_slabs(ages, 65_536, Part.KEYS) == 3 * 4 + 8 * 2 + 1013 * 2
    assert config.num_slabs(ages, 65_536, Part.VALUES) == 3 * 4 + 8 * 2 + 1013


@pytest.mark.parametrize(("cold_format", "num_cold"), [("k8v4", 5), ("int4", 5), ("int8", 13)])
def test_cold_values_behind_a_decoded_token(cold_format: str, num_cold: int) -> None:
    config = TierConfig(cold_format=cold_format)
    assert config.num_cold(1023) == num_cold - 1
    assert config.num_cold(1024) == num_cold
    assert config.num_cold(100) == 0


def test_exact_is_bf16_everywhere() -> None:
    config = TierConfig(exact=True)
    for ages in (config.decode_ages(9_000), config.prefill_ages(9_000)):
        assert set(formats(config, ages, 140)) == {HOT}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cold_format": "fp8"}, "k8v4, int4, int8, got 'fp8'"),
        ({"skip_epsilon": 1.0}, "skip_epsilon must be above 0 and below 1, or 0 .*, got 1.0"),
        ({"skip_epsilon": -0.1}, "skip_epsilon must be .*, got -0.1"),
        ({"hot_tokens": 0}, "hot_tokens must be a multiple of the block size 64 and at least 64"),
        ({"warm_tokens": 100}, "warm_tokens must be a multiple of the block size 64"),
        ({"sink_tokens": -64}, "at least 0, got -64"),
        ({"cell_tokens": 0}, "cell_tokens"),
        ({"exact": True, "cold_format": "int4"}, "exact"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TierConfig(**wrong)  # type: ignore[arg-type]
