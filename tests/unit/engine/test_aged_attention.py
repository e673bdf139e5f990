"""What every query sees of every age is what a loop over positions says, in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.cache.formats import Part
from engine.cache.tier_config import TierConfig
from engine.models.aged_attention import Age, aged_attention, has_aged, views_of
from kernels.kv_quantise.reference import (
    dequantised_keys,
    dequantised_values,
    quantised_keys,
    quantised_values,
)
from kernels.tiered_append.hadamard import rotated

SMALL = TierConfig(hot_tokens=64, warm_tokens=64)
TIERS = [
    SMALL,
    replace(SMALL, cold_format="int4"),
    replace(SMALL, cold_format="int8"),
    TierConfig(sink_tokens=0, hot_tokens=128, warm_tokens=0, cold_format="int4"),
    TierConfig(sink_tokens=128, hot_tokens=64, warm_tokens=128),
    TierConfig(sink_tokens=4096),
]
BITS = {"k8v4": (8, 4), "int4": (4, 4), "int8": (8, 8)}
NUM_TOKENS = 330  # not whole blocks
STRIDE = 5
CPU = torch.device("cpu")


def heads_of(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed), requires_grad=True)


def age_of(tiers: TierConfig, query: int, token: int) -> Age:
    """The rule as docs/kv-tiers.md has it."""
    block, own_block = token // 64, query // 64
    if token < tiers.sink_tokens or own_block - block <= tiers.hot_tokens // 64:
        return Age.YOUNG
    is_warm = own_block - block <= (tiers.hot_tokens + tiers.warm_tokens) // 64
    return Age.WARM if is_warm else Age.COLD


def read_back(heads: torch.Tensor, part: Part, bits: int) -> torch.Tensor:
    """heads [num_tokens, head_dim] float32, rotated; of a block that is not full NaN."""
    found = torch.full_like(heads, torch.nan)
    for start in range(0, len(heads) - 63, 64):
        block = heads[start : start + 64]
        found[start : start + 64] = (
            dequantised_keys(quantised_keys(block, bits), bits)
            if part is Part.KEYS
            else dequantised_values(quantised_values(block, bits), bits)
        )
    return found


def by_age(heads: torch.Tensor, part: Part, tiers: TierConfig) -> dict[Age, torch.Tensor]:
    warm = read_back(rotated(heads).bfloat16().float(), part, 8)
    bits = BITS[tiers.cold_format][part]
    cold = warm if bits == 8 else read_back(warm, part, bits)
    return {Age.YOUNG: heads, Age.WARM: rotated(warm), Age.COLD: rotated(cold)}


def loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiers: TierConfig,
    hide_cold: bool = False,
    is_visible: torch.Tensor | None = None,
    scale: float = 32**-0.5,
) -> torch.Tensor:
    """Of every `STRIDE`th query, the first one on."""
    batch, num_heads, num_tokens, _ = query.shape
    group = num_heads // key.shape[1]
    out = torch.zeros_like(query[:, :, ::STRIDE], dtype=torch.float64)
    for row in range(batch):
        for head in range(num_heads):
            keys = by_age(key[row, head // group], Part.KEYS, tiers)
            values = by_age(value[row, head // group], Part.VALUES, tiers)
            for place in range(0, num_tokens, STRIDE):
                ages = {token: age_of(tiers, place, token) for token in range(place + 1)}
                seen = [
                    (token, age)
                    for token, age in ages.items()
                    if not (hide_cold and age is Age.COLD)
                    and (is_visible is None or is_visible[row, 0, place, token])
                ]
                seen_keys = torch.stack([keys[age][token] for token, age in seen]).double()
                seen_values = torch.stack([values[age][token] for token, age in seen]).double()
                scores = seen_keys @ query[row, head, place].double() * scale
                out[row, head, place // STRIDE] = scores.softmax(0) @ seen_values
    return out


CASES = [*((tiers, False) for tiers in TIERS), (SMALL, True), (replace(SMALL, sink_tokens=0), True)]


@pytest.mark.parametrize(("tiers", "hide_cold"), CASES, ids=str)
def test_equals_a_loop_over_positions(tiers: TierConfig, hide_cold: bool) -> None:
    query, key, value = (heads_of(1, n, NUM_TOKENS, 32, seed=n).detach() for n in (2, 1, 1))
    found = aged_attention(query, key, value, tiers, hide_cold=hide_cold)
    expected = loop(query, key, value, tiers, hide_cold)
    torch.testing.assert_close(found[:, :, ::STRIDE].double(), expected, rtol=0, atol=2e-6)
    exact = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert has_aged(tiers, NUM_TOKENS) is not torch.allclose(found, exact, atol=1e-4)


def test_rows_of_a_batch_and_kv_heads_are_attended_apart_and_masks_hide_more() -> None:
    query, key, value = (heads_of(2, n, NUM_TOKENS, 32, seed=n).detach() for n in (4, 2, 2))
    is_visible = torch.ones(2, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    is_visible[0, :, :, 100:170] = False
    is_visible[1] = is_visible[1].triu(-200)  # a sliding window
    found = aged_attention(query, key, value, SMALL, is_visible=is_visible, scale=0.3)
    expected = loop(query, key, value, SMALL, is_visible=is_visible, scale=0.3)
    torch.testing.assert_close(found[:, :, ::STRIDE].double(), expected, rtol=0, atol=2e-6)


def test_a_query_sees_a_token_in_one_age_and_every_token_before_it() -> None:
    tiers = TierConfig(hot_tokens=128, warm_tokens=192)
    num_seen = torch.zeros(20 * 64, 20 * 64, dtype=torch.int64)
    for view in views_of(tiers, False, 20, CPU):
        num_seen[view.start : view.end].index_add_(1, view.places, view.is_seen.long())
    assert torch.equal(num_seen, torch.ones_like(num_seen).tril())


def test_gradients_pass_what_is_rounded_as_if_it_were_not() -> None:
    """A key has the sum of the gradients that it has in each age, taken as a leaf."""
    query, key, value = (heads_of(1, 1, NUM_TOKENS, 32, seed=seed) for seed in range(3))
    with torch.inference_mode():  # what is kept from here must not keep gradients out
        views_of.cache_clear()
        aged_attention(query, key, value, SMALL)
    wanted = heads_of(NUM_TOKENS, 32, seed=4).detach()
    (aged_attention(query, key, value, SMALL)[0, 0] * wanted).sum().backward()

    keys = leaves(by_age(key[0, 0], Part.KEYS, SMALL))
    values = leaves(by_age(value[0, 0], Part.VALUES, SMALL))
    asked = query[0, 0].detach().double().requires_grad_()
    places = range(NUM_TOKENS)
    ages = torch.tensor([[age_of(SMALL, each, token) for token in places] for each in places])
    is_ahead = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    scores = torch.stack([asked @ keys[age].T for age in Age]).gather(0, ages[None])[0]
    weights = (scores * 32**-0.5).masked_fill(is_ahead, -torch.inf).softmax(-1)
    out = sum(weights.masked_fill(ages != age, 0) @ values[age] for age in Age)
    (out * wanted).sum().backward()
    expected = (
        asked.grad,
        sum(each.grad for each in keys.values()),
        sum(each.grad for each in values.values()),
    )
    for ours, theirs in zip((query, key, value), expected, strict=True):
        torch.testing.assert_close(ours.grad[0, 0].double(), theirs, rtol=0, atol=1e-5)


def leaves(of_ages: dict[Age, torch.Tensor]) -> dict[Age, torch.Tensor]:
    """Tokens of blocks that never age that far are NaN: nobody sees them."""
    return {
        age: each.detach().double().nan_to_num().requires_grad_() for age, each in of_ages.items()
    }


def test_gradients_of_hidden_tokens_come_from_those_who_saw_them_young() -> None:
    query, key, value = (heads_of(1, 1, NUM_TOKENS, 32, seed=seed) for seed in range(3))
    aged_attention(query, key, value, SMALL, hide_cold=True)[:, :, -1].sum().backward()
    for each in (key, value):
        assert each.grad is not None
        is_touched = each.grad[0, 0].abs().sum(-1) > 0
        ages = [age_of(SMALL, NUM_TOKENS - 1, token) for token in range(NUM_TOKENS)]
        assert is_touched.tolist() == [age is not Age.COLD for age in ages]
