"""Attention over tiers, beside what their rule says by absolute positions; and that what is stored
does not depend on how the work was cut."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.cache.formats import Part
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from engine.execution.flash_attention import VllmFlashAttention, find_flash_attention
from engine.execution.kv_tensors import KVTensors
from engine.execution.tiered_attention import TieredAttention
from engine.execution.tiered_kv import TieredKV
from engine.execution.tiered_pages import num_pages_for
from engine.execution.triton_attention import TritonAttention
from engine.scheduling.batch import ScheduledBatch
from engine.sequence import Sequence
from kernels.checked_interpreter import checked
from kernels.tiered_append.hadamard import rotated
from kernels.tiered_append.reference import turned
from tests.unit.engine import dense_tiers
from tests.unit.engine.test_flash_attention import fake_flash_attention, install
from tests.unit.engine.tiered_plans import TieredPlans

HEADS, KV_HEADS, SIZE, VOCAB_SIZE, SCALE = 4, 2, 64, 199, 0.2
SMALL = TierConfig(sink_tokens=64, hot_tokens=64, warm_tokens=64, cell_tokens=128)
LAYERS = ("int4", "k8v4", "int8", "k8v4")  # their cold formats
MAX_TOKENS = 1400
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Others wait for each other longer than such small work takes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(
        VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def heads_of(layer: int, name: str, num_heads: int) -> torch.Tensor:
    """Of every token of the vocabulary: channels of many sizes, values apart from zero."""
    seed = 10 * layer + "qkv".index(name)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB_SIZE, num_heads, SIZE, generator=generator)
    return table * (1 + 3 * torch.rand(SIZE, generator=generator)) + 0.5


TABLES = [
    tuple(
        heads_of(layer, name, num) for name, num in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    for layer in range(len(LAYERS))
]


ANGLES = torch.arange(MAX_TOKENS)[:, None].float() * torch.logspace(0, -3, SIZE // 2)
ANGLES = torch.cat((ANGLES, ANGLES), -1)[:, None]
COS, SIN = ANGLES.cos(), ANGLES.sin()  # of all positions at once: each always the same


class Steps:
    """A backend without a model: queries, keys and values follow from the tokens alone."""

    def __init__(
        self,
        config: TierConfig,
        num_pages: int | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        prompts_by: type[TritonAttention] = TritonAttention,
        deterministic: bool = False,
    ) -> None:
        self.dtype = dtype
        groups = [
            TierGroup(
                replace(config, cold_format=name),
                tuple(layer for layer, each in enumerate(LAYERS) if each == name),
                600,
                600,
            )
            for name in dict.fromkeys(LAYERS)
        ]
        self.kv = TieredKV.allocate(groups, KV_HEADS, SIZE, CPU)
        for slabs in self.kv.whole:  # no number wherever nothing was stored
            for tensor in slabs:
                tensor.view(torch.uint8).fill_(0xFF)
        shape = (num_pages or num_pages_for(config, MAX_TOKENS, MAX_TOKENS), 64, KV_HEADS, SIZE)
        pages = KVTensors(*[(torch.full(shape, float("nan"), dtype=dtype),) for _ in Part])
        prompts = prompts_by(pages, [None], SCALE, deterministic=deterministic)
        self.backend = TieredAttention(
            self.kv, pages, prompts, HEADS, SCALE, deterministic=deterministic
        )
        self.plans = TieredPlans(groups)
        self.attended: dict[Sequence, list[list[torch.Tensor]]] = {}  # by layer

    def open(self, token_ids: Items[int]) -> Sequence:
        sequence = self.plans.open(token_ids)
        self.attended[sequence] = [[] for _ in LAYERS]
        return sequence

    def step(self, *chunks: tuple[Sequence, int]) -> ScheduledBatch:
        batch = self.plans.plan(*chunks)
        inputs = self.backend.build_inputs(batch)
        metadata = self.backend.prepare(inputs)
        turns = [each[inputs.positions].to(self.dtype) for each in (COS, SIN)]
        for layer, tables in enumerate(TABLES):
            given = [table[inputs.input_ids].to(self.dtype) for table in tables]
            out = self.backend.attend(layer, *given, *turns, metadata)
            row = 0
            for entry in sorted(batch.scheduled, key=lambda entry: not entry.spans[0].is_decode):
                rows = slice(row, row := row + entry.num_new_tokens)
                assert inputs.input_ids[rows].tolist() == entry.new_token_ids
                assert inputs.positions[rows].tolist() == list(range(entry.start, entry.end))
                self.attended[entry.sequence][layer].append(out[rows])
        self.plans.book(batch)
        return batch

    def prefill(self, sequence: Sequence, chunk_lens: Iterable[int]) -> None:
        for num_tokens in chunk_lens:
            self.step((sequence, min(num_tokens, sequence.num_uncomputed_tokens)))

    def decode(self, sequence: Sequence, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            self.step((sequence, 1))

    def stored(self, sequence: Sequence, layer: int) -> list[np.ndarray]:
        """All that is stored of its full blocks, wherever it lies."""
        number, slabs = self.kv.group_of[layer], self.kv.layers[layer]
        table = self.plans.tenures[sequence].tables[number]
        found = []
        for part in Part:
            arena, meta = slabs[part], slabs[2 + part]
            column = torch.from_numpy(table.slab_ids(part)).long()
            num_hot = 4 * -(-(table.num_tokens - table.bounds[2]) // 64)
            num_whole = num_hot - (4 if table.num_tokens % 64 else 0)
            first_hot = len(column) - num_hot
            found.append(arena[column[: first_hot + num_whole]].numpy())
            grain = self.kv.groups[number].config.cold[part].num_slabs
            sinks = table.bounds[0] // 16
            found.append(meta[column[sinks:first_hot:grain] // grain].view(torch.uint8).numpy())
        return found


def expected(
    config: TierConfig, sequence: Sequence, layer: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    tokens = torch.tensor(sequence.token_ids)
    query, key, value = (table[tokens].to(dtype) for table in TABLES[layer])
    cos, sin = (each[: len(tokens)].to(dtype) for each in (COS, SIN))
    return dense_tiers.attended(
        replace(config, cold_format=LAYERS[layer]),
        sequence.num_prompt_tokens,
        rotated(turned(query, cos, sin)).to(dtype),
        rotated(turned(key, cos, sin)).bfloat16(),
        value.bfloat16(),
        SCALE,
    )


def assert_right(steps: Steps, config: TierConfig, sequence: Sequence, start: int = 0) -> None:
    for layer in range(len(LAYERS)):
        came = torch.cat(steps.attended[sequence][layer]).double()
        right = expected(config, sequence, layer)[start:]
        torch.testing.assert_close(came, right, rtol=1e-4, atol=1e-4)


NUM_PROMPT_TOKENS = 460
CHUNKS = {
    "at once": [460],
    "by cells": [128] * 4,
    "by blocks": [64] * 8,
    "ragged": [1, 63, 2, 200, 67, 100, 5, 22],
}


def after(
    config: TierConfig, chunk_lens: Items[int], num_decodes: int = 0
) -> tuple[Steps, Sequence]:
    steps = Steps(config)
    sequence = steps.open(text(NUM_PROMPT_TOKENS))
    steps.prefill(sequence, chunk_lens)
    steps.decode(sequence, text(num_decodes, seed=1))
    return steps, sequence


@pytest.mark.parametrize("chunk_lens", CHUNKS.values(), ids=CHUNKS.keys())
def test_a_prompt_sees_what_the_rule_says(chunk_lens: list[int]) -> None:
    steps, sequence = after(SMALL, chunk_lens)
    assert_right(steps, SMALL, sequence)


def test_what_is_stored_does_not_depend_on_the_chunks() -> None:
    whole, sequence = after(SMALL, CHUNKS["at once"], num_decodes=54)
    for chunk_lens in list(CHUNKS.values())[1:]:
        other, again = after(SMALL, chunk_lens, num_decodes=54)
        for layer in range(len(LAYERS)):
            pairs = zip(whole.stored(sequence, layer), other.stored(again, layer), strict=True)
            assert all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def test_decodes_see_what_the_rule_says() -> None:
    """Long enough for a block to be hot, warm and cold."""
    steps, sequence = after(SMALL, [200, 260], num_decodes=125)
    assert_right(steps, SMALL, sequence)


def test_the_usual_tiers() -> None:
    config = TierConfig()
    steps = Steps(config)
    sequence = steps.open(text(1340))
    steps.prefill(sequence, [1000, 340])
    steps.decode(sequence, text(12, seed=1))
    assert_right(steps, config, sequence)


@pytest.mark.parametrize("num_pages", [None, 9])
def test_many_sequences_in_one_step(num_pages: int | None) -> None:
    """Decodes beside chunks, which do not fit into few pages together."""
    steps = Steps(SMALL, num_pages)
    first, second, third = (steps.open(text(num, seed=num)) for num in (333, 70, 500))
    steps.step((first, 333), (second, 30), (third, 100))
    for token_id in text(4, seed=5):
        first.token_ids.append(token_id)
        steps.step((third, 80), (first, 1), (second, 10))
    fourth = steps.open(text(20, seed=4))
    second.token_ids.append(7)
    steps.step((fourth, 20), (second, 1), (third, 80))
    for sequence in (first, second, third, fourth):
        assert_right(steps, SMALL, sequence)


def test_blocks_of_a_shared_prefix_are_read_where_they_lie() -> None:
    steps, first = after(SMALL, CHUNKS["at once"], num_decodes=10)
    follower = steps.open(text(NUM_PROMPT_TOKENS)[:400] + text(100, seed=6))
    start = follower.num_computed_tokens
    assert start == 384
    steps.prefill(follower, [50, 66])
    steps.decode(follower, text(20, seed=7))
    steps.decode(first, text(50, seed=8))
    assert_right(steps, SMALL, follower, start)
    assert_right(steps, SMALL, first)


def test_what_prompts_attend_over_has_no_place_without_a_number() -> None:
    steps = Steps(SMALL)
    sequence = steps.open(text(300))
    steps.step((sequence, 300))
    (values,) = steps.backend._pages.values
    assert values[:6].isfinite().all()  # block 1 is there twice: cold, and hot to the first cell
    assert not values[6:].isfinite().any()


def test_by_the_kernels_it_is_the_same() -> None:
    """Checked: no kernel reads or writes what is not its own, nor what is no number."""
    steps = Steps(SMALL, dtype=torch.bfloat16)
    with checked():
        first, second = steps.open(text(260)), steps.open(text(40, seed=2))
        steps.step((first, 260))
        first.token_ids.append(7)
        steps.step((second, 40), (first, 1))
        for sequence in (first, second):
            sequence.token_ids.append(9)
        steps.step((first, 1), (second, 1))
    for sequence in (first, second):
        for layer in range(len(LAYERS)):
            came = torch.cat(steps.attended[sequence][layer]).double()
            right = expected(SMALL, sequence, layer, torch.bfloat16)
            assert (came - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_a_decode_gives_depends_on_others_unless_it_must_not(deterministic: bool) -> None:
    def decoded(*others: int) -> list[torch.Tensor]:
        steps = Steps(SMALL, dtype=torch.bfloat16, deterministic=deterministic)
        sequences = [steps.open(text(num, seed=num)) for num in (*others, 280)]
        for sequence in sequences:
            steps.prefill(sequence, [sequence.num_tokens])
            sequence.token_ids.append(7)
        with checked():
            steps.step(*((sequence, 1) for sequence in sequences))
        return [each[-1] for each in steps.attended[sequences[-1]]]

    pairs = list(zip(decoded(), decoded(50, 300), strict=True))
    assert all(torch.equal(alone, beside) for alone, beside in pairs) == deterministic


def test_prompts_by_flash_attention(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    calls: list[int] = []
    find_flash_attention.cache_clear()
    request.addfinalizer(find_flash_attention.cache_clear)
    install(monkeypatch, fake_flash_attention(calls))
    attended = []
    for prompts_by in (VllmFlashAttention, TritonAttention):
        steps = Steps(SMALL, dtype=torch.bfloat16, prompts_by=prompts_by)
        first, second = steps.open(text(300)), steps.open(text(90, seed=2))
        steps.step((first, 300))
        first.token_ids.append(7)
        steps.step((first, 1), (second, 90))
        attended.append([torch.cat(each) for each in steps.attended[second]])
    assert calls == [300] * len(LAYERS) + [90] * len(LAYERS)
    assert all(map(torch.equal, *attended))
