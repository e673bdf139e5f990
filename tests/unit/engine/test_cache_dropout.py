"""Models of transformers under cache dropout: what they compute, when, and that they come back."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from engine.cache.formats import Part
from engine.cache.tier_config import TierConfig
from engine.errors import UnsupportedModel
from engine.models import cache_dropout as module
from engine.models.aged_attention import Age
from engine.models.cache_dropout import cache_dropout
from tests.unit.engine.test_aged_attention import age_of, by_age, heads_of
from tests.unit.engine.tiny_checkpoint import SIZES

SMALL = TierConfig(hot_tokens=64, warm_tokens=64, cold_format="int4")
NUM_TOKENS = 400


def tiny_model(family: str = "Llama", **changes: Any) -> Any:
    import transformers

    sizes = {"head_dim": 32, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes | changes)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def token_ids(num_rows: int = 1, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randint(0, 199, (num_rows, num_tokens), generator=torch.manual_seed(1))


def logits_of(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model(ids, use_cache=False, **options).logits


def test_never_aged_equals_the_model_bit_for_bit() -> None:
    model, ids = tiny_model(), token_ids()
    plain = logits_of(model, ids)
    with cache_dropout(model, SMALL, probability=0.0):
        assert torch.equal(logits_of(model, ids), plain)
    with cache_dropout(model, TierConfig(sink_tokens=512)):  # and where nothing is old enough
        assert torch.equal(logits_of(model, ids), plain)


def test_what_comes_before_anything_ages_is_as_it_was_and_what_comes_after_is_not() -> None:
    model, ids = tiny_model(), token_ids()
    plain = logits_of(model, ids)[0]
    with cache_dropout(model, SMALL):
        aged = logits_of(model, ids)[0]
    with cache_dropout(model, SMALL, hide_cold=True):
        hidden = logits_of(model, ids)[0]
    differs = (aged - plain).abs().amax(-1) > 1e-4
    assert not differs[:192].any()  # a sink, a hot block, and the query's own
    assert differs[192:].all()
    torch.testing.assert_close(hidden[:256], aged[:256], rtol=0, atol=1e-5)  # the next was warm
    assert ((hidden - aged)[256:].abs().amax(-1) > 1e-2).all()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 200}),
        ("Qwen2", {}),
        ("Qwen3", {}),
    ],
)
def test_a_layer_attends_as_a_loop_over_positions_does(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last query of each head, with what the model itself gives for queries and keys."""
    model, ids = tiny_model(family, num_hidden_layers=1, **changes), token_ids()
    calls: list[tuple[torch.Tensor, ...]] = []
    aged_attention = module.aged_attention

    def spied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any):
        calls.append((query, key, value, aged_attention(query, key, value, *args, **kw)))
        return calls[-1][-1]

    monkeypatch.setattr(module, "aged_attention", spied)
    with cache_dropout(model, SMALL), torch.inference_mode():
        logits_of(model, ids)

    [(query, key, value, found)] = calls
    last, window = NUM_TOKENS - 1, changes.get("sliding_window", NUM_TOKENS)
    for head in range(query.shape[1]):
        keys = by_age(key[0, head // 3], Part.KEYS, SMALL)
        values = by_age(value[0, head // 3], Part.VALUES, SMALL)
        seen = [(age_of(SMALL, last, each), each) for each in range(last - window + 1, last + 1)]
        assert {age for age, _ in seen} == set(Age)
        scores = torch.stack([keys[age][each] @ query[0, head, last] for age, each in seen])
        weights = (scores.double() * 32**-0.5).softmax(0)
        expected = weights @ torch.stack([values[age][each] for age, each in seen]).double()
        torch.testing.assert_close(found[0, head, last].double(), expected, rtol=0, atol=1e-5)


def test_each_call_takes_the_aged_history_with_the_probability() -> None:
    query = heads_of(1, 1, 256, 32, seed=0).detach()
    attention, layer = module.AgingAttention(SMALL, 0.3, False), torch.nn.Module()
    exact, _ = module.AgingAttention(SMALL, 0.0, False)(layer, query, query, query, None)
    torch.manual_seed(0)
    called = [attention(layer, query, query, query, None)[0] for _ in range(200)]
    is_aged = [not torch.equal(each, exact) for each in called]
    assert 40 <= sum(is_aged) <= 80
    torch.manual_seed(0)
    assert is_aged == [torch.rand(()).item() < 0.3 for _ in range(200)]


def test_padding_is_not_seen() -> None:
    model, ids = tiny_model(), token_ids(num_rows=2)
    mask = torch.ones_like(ids)
    mask[0, :64] = 0
    mask[1, 350:] = 0
    other_padding = torch.where(mask == 1, ids, 7)
    with cache_dropout(model, SMALL):
        first, second = (
            logits_of(model, each, attention_mask=mask) for each in (ids, other_padding)
        )
        alone = logits_of(model, ids[1:, :350])
    assert first.isfinite().all()
    assert torch.equal(first[mask == 1], second[mask == 1])
    torch.testing.assert_close(first[1:, :350], alone, rtol=0, atol=1e-4)


def test_a_step_of_training_reaches_every_projection() -> None:
    model, ids = tiny_model(), token_ids(num_rows=2)
    model.train()
    with cache_dropout(model, SMALL):
        model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_computing_a_pass_anew_draws_the_same_layers() -> None:
    """As gradient checkpointing does, which keeps torch's random state."""
    model, ids = tiny_model(), token_ids()
    model.train()
    grads = []
    for is_checkpointed in (False, True):
        model.zero_grad()
        torch.manual_seed(5)
        with cache_dropout(model, SMALL, probability=0.5):
            logits = (
                checkpoint(logits_of, model, ids, use_reentrant=False)
                if is_checkpointed
                else logits_of(model, ids)
            )
            logits.square().mean().backward()
        grads.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_two_models_age_apart_and_each_comes_back() -> None:
    model, other, ids = tiny_model(), tiny_model(), token_ids()
    plain = logits_of(model, ids)
    with cache_dropout(model, SMALL):
        aged = logits_of(model, ids)
        with cache_dropout(other, SMALL, hide_cold=True):
            hidden = logits_of(other, ids)
            assert torch.equal(logits_of(model, ids), aged)
        assert torch.equal(logits_of(other, ids), plain)
    assert not torch.equal(hidden, aged)
    assert torch.equal(logits_of(model, ids), plain)
    with pytest.raises(KeyError), cache_dropout(model, SMALL):
        raise KeyError
    assert torch.equal(logits_of(model, ids), plain)


@pytest.mark.parametrize(
    ("tiers", "probability", "said"),
    [
        (SMALL, -0.1, "between 0 and 1, got -0.1"),
        (SMALL, 1.1, "between 0 and 1, got 1.1"),
        (SMALL, float("nan"), "between 0 and 1, got nan"),
        (TierConfig(exact=True), 0.5, "nothing ages; name a cold_format"),
        (TierConfig(block_size=32), 0.5, "block_size must be 64, got 32"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    tiers: TierConfig, probability: float, said: str
) -> None:
    with (
        pytest.raises(ValueError, match=said),
        cache_dropout(tiny_model(), tiers, probability=probability),
    ):
        pass


@pytest.mark.parametrize(("head_dim", "said"), [(48, "power of two"), (16, "at least 32, this")])
def test_heads_that_a_tiered_cache_cannot_hold_are_refused(head_dim: int, said: str) -> None:
    with (
        pytest.raises(UnsupportedModel, match=said),
        cache_dropout(tiny_model(head_dim=head_dim), SMALL),
    ):
        pass


def test_models_with_another_attention_are_refused_and_so_is_a_second_dropout() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    with (
        pytest.raises(ValueError, match="is 'sdpa', this one's is 'eager'; call"),
        cache_dropout(model, SMALL),
    ):
        pass
    model.set_attn_implementation("sdpa")
    with (
        cache_dropout(model, SMALL),
        pytest.raises(ValueError, match=r"this one's is .cache dropout: "),
        cache_dropout(model, SMALL),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query": torch.zeros(1, 1, 100, 32)}, "100 queries of 256 keys; pass no past"),
        ({"attention_mask": torch.zeros(1, 1, 256, 256)}, r"mask of bool, got torch\.float32"),
        ({"softcap": 30.0}, "with softcap"),
        ({"s_aux": torch.zeros(1)}, "with s_aux"),
        ({"is_causal": False}, "needs causal attention"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], said: str) -> None:
    names = ("query", "key", "value")
    given = {name: torch.zeros(1, 1, 256, 32) for name in names} | {"attention_mask": None}
    with pytest.raises(ValueError, match=said):
        module.AgingAttention(SMALL, 1.0, False)(torch.nn.Module(), **given | changes)
