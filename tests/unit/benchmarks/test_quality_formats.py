"""What formats give back, and where they are put in the exact cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quality import formats
from benchmarks.quality.formats import BY_CHANNEL, BY_TOKEN, Format, Grain, read_back
from benchmarks.quality.paged_plans import EmulatedAges, PagedPlans
from benchmarks.quality.settings import Emulated
from engine.cache.formats import WARM
from engine.cache.tier_config import TierConfig
from engine.execution.kv_tensors import KVTensors
from kernels.kv_quantise.reference import (
    dequantised_keys,
    dequantised_values,
    quantised_keys,
    quantised_values,
)
from kernels.tiered_append.hadamard import rotated

GRAINS = (BY_CHANNEL, BY_TOKEN, Grain(32, 1), Grain(1, 32))
TIERS = TierConfig(cold_format="int4", hot_tokens=64, warm_tokens=64, cell_tokens=128)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2 + torch.randn(shape[-1:]) * 5


@given(
    st.sampled_from(GRAINS), st.sampled_from((2, 4, 8)), st.floats(0.01, 50), st.integers(0, 1000)
)
@settings(max_examples=15)
def test_a_value_comes_back_within_half_a_step_of_its_grain(
    grain: Grain, bits: int, scale: float, seed: int
) -> None:
    exact = numbers(2, 64, 3, 64, seed=seed) * scale
    back = read_back(exact, bits, grain)
    assert back.shape == exact.shape
    channels = grain.num_channels or 64
    for token in range(0, 64, max(grain.num_tokens, 16)):
        for channel in range(0, 64, max(channels, 16)):
            of_grain = (
                ...,
                slice(token, token + grain.num_tokens),
                1,
                slice(channel, channel + channels),
            )
            one = exact[of_grain].flatten(1)
            step = (one.amax(1) - one.amin(1)) / (2**bits - 1)
            error = (back[of_grain].flatten(1) - one).abs().amax(1)
            assert (error <= 0.5 * step + 2e-3 * one.abs().amax(1) + 1e-5).all()


def test_a_grain_of_equal_values_comes_back_as_it_was() -> None:
    same = torch.full((64, 2, 64), 1.5)
    for grain in GRAINS:
        assert torch.equal(read_back(same, 4, grain), same)


@pytest.mark.parametrize(
    ("cold", "num_bytes"),
    [
        (formats.INT4, 140),
        (formats.K8V4, 204),
        (formats.INT8, 268),
        (formats.INT4_BY_TOKEN, 136),
        (formats.KIVI_4, 160),
        (formats.KIVI_2, 96),
    ],
)
def test_bytes_of_a_token_with_scales_and_zeros(cold: Format, num_bytes: float) -> None:
    assert cold.num_bytes(128) == num_bytes


def test_our_bits_are_those_of_the_kernels_and_8_bits_are_not_rounded_again() -> None:
    exact = numbers(64, 2, 64)
    turned = rotated(exact).transpose(0, 1)  # by heads
    keys = dequantised_keys(quantised_keys(turned, 8), 8, torch.float32)
    values = dequantised_values(quantised_values(turned, 4), 4, torch.float32)
    assert torch.equal(formats.K8V4.keys_back(exact), rotated(keys.transpose(0, 1)))
    assert torch.equal(formats.K8V4.values_back(exact), rotated(values.transpose(0, 1)))
    assert torch.equal(formats.K8V4.of_int8.keys_back(exact), exact)
    assert not torch.equal(formats.K8V4.of_int8.values_back(exact), exact)
    assert torch.equal(formats.INT8.of_int8.values_back(exact), exact)
    assert formats.INT4.of_int8 == formats.INT4


def test_a_block_is_replaced_as_it_gets_warm_and_cold_in_every_layer() -> None:
    layers = tuple(numbers(24, 64, 2, 64, seed=layer) for layer in range(2))
    kv = KVTensors(tuple(map(torch.clone, layers)), tuple(map(torch.clone, layers)))
    plans, ages = PagedPlans(24, 64, 640), EmulatedAges(kv)
    aged, exact = plans.open(range(400)), plans.open(range(400))
    ages.put(aged, Emulated(TIERS, formats.INT8, formats.INT4, formats.INT4.of_int8))
    stored = {}  # by block of the sequence: as what
    while aged.num_computed_tokens < 600:
        num_tokens = max(0, min(128, 400 - aged.num_computed_tokens)) or 1
        if num_tokens == 1:
            aged.token_ids.append(0)
            exact.token_ids.append(0)
        start = aged.num_computed_tokens
        batch = plans.plan((aged, num_tokens), (exact, num_tokens))
        before = kv.keys[1].clone()
        ages.advance(batch)
        now = TIERS.decode_ages(start) if num_tokens == 1 else TIERS.prefill_ages(start)
        told = {block: TIERS.format_at(now, block) for block in range(now.hot_start)}
        changed = {block for block in range(10) if told.get(block) != stored.get(block)} - {0}
        differs = (kv.keys[1] != before).flatten(1).any(1)
        assert set(differs.nonzero()[:, 0].tolist()) == {aged.block_table[b] for b in changed}
        stored = told
        plans.book(batch)
    assert [block for block, now in stored.items() if now is WARM] == [7]
    block = layers[1][aged.block_table[3]]  # cold since the prompt, at once
    assert torch.equal(kv.keys[1][aged.block_table[3]], formats.INT4.keys_back(block))
    block = layers[0][aged.block_table[6]]  # warm first
    warm = formats.INT8.values_back(block)
    assert torch.equal(kv.values[0][aged.block_table[6]], formats.INT4.values_back(warm))
    plans.close(aged)
    assert not set(plans.open(range(5)).block_table) & set(exact.block_table)
