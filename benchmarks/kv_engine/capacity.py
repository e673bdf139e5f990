"""`python -m benchmarks.kv_engine.capacity OUT.json`: how many sequences decode at the same time in
memory that is really taken, in bfloat16 and in the same bytes with tiers. In a process of its own,
as the engines are; without weights, so that the cache may be as large as a server's.
"""

import sys
import tempfile
import time
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.engine.gpu_process import end_with_parent
from benchmarks.engine.job import Outcome
from benchmarks.engine.shapes import LLAMA_8B
from benchmarks.soak.watch import resident_bytes
from engine.cache.block_allocator import BlockAllocator
from engine.cache.formats import BLOCK_SIZE, COLD_FORMATS
from engine.cache.tier_config import TierConfig
from engine.config import SchedulerConfig
from engine.execution.kv_tensors import KVTensors
from engine.execution.tiered_kv import TieredKV
from engine.models.model_config import ModelConfig
from engine.outputs import SampledTokens
from engine.ranks.group import SINGLE_RANK
from engine.sampling_params import SamplingParams
from engine.scheduling.kv_space import KvSpace
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.tiered_space import TieredSpace
from engine.sequence import Sequence
from engine.tiering import arena_groups, tier_groups

EXACT = "exact"
CONTEXT = 65536
NUM_EXACT = 13  # such sequences in bf16: what an H200 has beside 8B weights, at 0.9 of its memory
SPARE_BLOCKS = 3  # of each of them, to decode in until the last has come
MAX_SEQUENCES = 256
CHUNK = 8192
MAX_TOKENS = 4096  # of a completion: none ends meanwhile
PATIENCE = 4  # steps in which all could be given that earlier ones have freed


@dataclass(frozen=True, slots=True)
class Fit:
    """`kv_bytes` of tensors, of which `host_bytes` are not on the device; by `host_growth_bytes`
    the process grew on the host meanwhile, its books included."""

    num_sequences: int
    num_tokens: int
    kv_bytes: int
    host_bytes: int
    host_growth_bytes: int


def main() -> None:
    end_with_parent()
    started_s = time.time()
    file, device = Path(sys.argv[1]), torch.device("cuda", 0)
    with tempfile.TemporaryDirectory(prefix="flashray-shape-") as folder:
        model = ModelConfig.from_folder(LLAMA_8B.write(Path(folder), 2 * CONTEXT))
    torch.zeros(1, device=device)  # what CUDA itself takes of the host is nobody's
    outcome = Outcome("flashray", time.time() - started_s)
    for name in (EXACT, *COLD_FORMATS):
        fit = fit_of(name, model, device)
        outcome.facts[name] = asdict(fit)
        outcome.samples[name] = [fit.num_tokens]
        print(f"  {name}: {fit}", file=sys.stderr, flush=True)
        outcome.write(file)


def fit_of(
    name: str,
    model: ModelConfig,
    device: torch.device,
    num_exact: int = NUM_EXACT,
    context: int = CONTEXT,
) -> Fit:
    """`name`: EXACT, or a cold format. The memory holds `num_exact` sequences in bf16, and of it is
    gone again what was taken."""
    resident = resident_bytes()["rss"]
    num_blocks = num_exact * (context // BLOCK_SIZE + SPARE_BLOCKS)
    if name == EXACT:
        tensors, space = _exact(model, device, num_blocks)
    else:
        tensors, space = _tiered(name, model, device, num_blocks, context)
    num_sequences = fill(space, context)
    fit = Fit(
        num_sequences,
        num_sequences * context,
        sum(each.nbytes for each in tensors),
        sum(each.nbytes for each in tensors if each.device != device),
        int(resident_bytes()["rss"] - resident),
    )
    del tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return fit


def fill(space: KvSpace, context: int) -> int:
    """Sequences with prompts of `context` tokens that decode beside each other, none of them ever
    preempted, until the next is not let in: planned as an engine plans, each token made up."""
    limits = SchedulerConfig(MAX_SEQUENCES, CHUNK + MAX_SEQUENCES)
    scheduler = Scheduler(limits, space, context + MAX_TOKENS)
    params = SamplingParams(MAX_TOKENS, temperature=0.0)
    num_joined = 0
    while True:
        sequence = Sequence(str(num_joined), [0] * context, context, params)
        scheduler.add(sequence)
        if not _joins(scheduler, sequence):
            scheduler.check_integrity()
            return num_joined
        num_joined += 1


def _joins(scheduler: Scheduler, sequence: Sequence) -> bool:
    num_waits = 0
    while sequence.num_completion_tokens == 0:
        batch = scheduler.schedule()
        num_sampled = len(batch.sampling)
        scheduler.postprocess(batch, SampledTokens((0,) * num_sampled, (None,) * num_sampled))
        num_waits += scheduler.num_waiting
        if batch.preempted or num_waits > PATIENCE:
            return False
    return True


def _exact(
    model: ModelConfig, device: torch.device, num_blocks: int
) -> tuple[Items[torch.Tensor], KvSpace]:
    kv = KVTensors.allocate(model, num_blocks, BLOCK_SIZE, torch.bfloat16, device)
    allocator = BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=False)
    return kv.tensors, PagedSpace(allocator, b"")


def _tiered(
    cold_format: str, model: ModelConfig, device: torch.device, num_blocks: int, context: int
) -> tuple[Items[torch.Tensor], KvSpace]:
    """In the bytes of so many blocks of bf16, shared out for sequences of this context."""
    num_bytes = num_blocks * BLOCK_SIZE * 2 * model.num_layers * model.num_kv_heads
    num_bytes *= model.head_dim * torch.bfloat16.itemsize
    layers_of = [(tuple(range(model.num_layers)), TierConfig(cold_format=cold_format))]
    groups = tier_groups(layers_of, model, num_bytes, context)
    kv = TieredKV.allocate(groups, model.num_kv_heads, model.head_dim, device)
    assert kv.num_bytes <= num_bytes, (kv.num_bytes, num_bytes)
    space = TieredSpace(arena_groups(groups, b"", SINGLE_RANK), b"", enable_prefix_cache=False)
    return [each for slabs in kv.whole for each in slabs], space


if __name__ == "__main__":
    main()
