"""Recorded decodes that leave out values of cold blocks: what they give, and certify, is what the
float64 specification says of the cache and the lists that they had."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.skipping_decodes import SkippingDecodes
from engine.execution.tiered_attention import TieredAttention
from engine.execution.tiered_decodes import PlannedRows
from engine.execution.tiered_skips import StepSkips
from engine.sampling_params import SamplingParams
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_skip import reference
from kernels.tiered_skip.rounding import SUM_ERROR
from tests.engine_gpu.engines import NUM_LAYERS, SMALL_TIERS, VOCAB_SIZE, build, device_config

pytestmark = pytest.mark.gpu

EPSILON = 0.5  # of few blocks, which weigh much
NUM_PROMPT_TOKENS, NUM_TOKENS = 900, 70
MOST_WRONG = 0.02  # of results in bfloat16


@dataclass(frozen=True)
class Attended:
    """Of one layer of a step of one sequence. They belong to the graph, and change with it."""

    query: torch.Tensor
    decodes: PlannedRows
    skips: torch.Tensor
    left_out: torch.Tensor
    sums: tuple[torch.Tensor, torch.Tensor]
    reach: torch.Tensor
    result: torch.Tensor


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> dict[int, Attended]:
    """By layer, what the graph of one row has attended to at its last replay."""
    found: dict[int, Attended] = {}
    attend: Callable[..., torch.Tensor] = SkippingDecodes.attend

    def spied(
        skipping: Any, layer: int, query: torch.Tensor, decodes: PlannedRows, step: StepSkips
    ) -> torch.Tensor:
        nth = skipping._nth[layer]
        query, skips = query.clone(), step.skips[nth].clone()
        result = attend(skipping, layer, query, decodes, step)
        left_out, lse, skipped = (
            each[nth].clone() for each in (step.left_out, step.lse, step.skipped)
        )
        if len(query) == 1:
            sums, reach = (lse, skipped), step.reach[nth].clone()
            found[layer] = Attended(query, decodes, skips, left_out, sums, reach, result)
        return result

    monkeypatch.setattr(SkippingDecodes, "attend", spied)
    return found


@pytest.mark.parametrize("cold_format", ["k8v4", "int4"])
def test_what_a_graph_certifies_is_so(
    folder: Path, attended: dict[int, Attended], cold_format: str
) -> None:
    tiers = replace(SMALL_TIERS, cold_format=cold_format, skip_epsilon=EPSILON)
    config = device_config(folder, dtype="bfloat16", tiers=tiers, max_num_batched_tokens=1_024)
    engine, runner = build(config)
    prompt = random.Random(7).choices(range(VOCAB_SIZE), k=NUM_PROMPT_TOKENS)
    engine.add("one", prompt, SamplingParams(NUM_TOKENS, temperature=0.0))
    backend = runner._backend
    assert isinstance(backend, TieredAttention)
    num_left_out = num_same = num_steps = 0
    while engine.has_work:
        engine.step()
        if engine.stats.num_decode_tokens and num_steps % 20 == 19:
            for layer in range(NUM_LAYERS):
                num_left_out += int(attended[layer].left_out.sum())
                num_same += assert_certified(backend, layer, attended[layer])
        num_steps += 1
    assert num_left_out > 0
    assert num_same > 0
    assert 0 < runner.skipped.greatest_certificate <= EPSILON
    assert runner.skipped.read_blocks < runner.skipped.cold_blocks


def assert_certified(backend: TieredAttention, layer: int, came: Attended) -> bool:
    """-> whether the specification reads the same blocks again: rounding may decide that."""
    kv, formats = backend._kv, backend._formats[0]
    tables, scale = came.decodes.tables, kv.head_dim**-0.5
    slabs = Slabs(*(each.cpu() for each in kv.layers[layer]))
    columns = (each.cpu() for each in (tables.key_tables, tables.value_tables, tables.bounds))
    given = (came.query.cpu(), slabs, *columns, formats, scale)
    skips, reach = came.skips.cpu(), came.reach.cpu()
    masses = torch.zeros(*skips.shape, came.query.shape[1] // skips.shape[1])
    lse, skipped = (each.cpu().double() for each in came.sums)
    certificate = torch.sigmoid(skipped - lse)
    assert certificate.max() <= EPSILON

    left_out = came.left_out.cpu()
    state = left_out, masses, left_out.clone(), torch.zeros_like(reach)
    out, whole, unread = reference.tiered_skip(*given, *state, 0.9999)
    assert (torch.sigmoid(unread - 2 * SUM_ERROR - whole) <= certificate).all()
    result = came.result.cpu().double()
    assert (result - out).norm() <= MOST_WRONG * out.norm()

    again = skips.clone()
    reference.tiered_skip(*given, skips, masses, again, reach, EPSILON)
    return torch.equal(again, left_out)
