"""Tokens per second of two that take turns, and proof that they made the same tokens."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.command import Progress
from benchmarks.engine.contestants import Contestant, FlashEngine, HuggingFace
from benchmarks.engine.prompts import prompts
from benchmarks.errors import MeasurementFailed
from benchmarks.results import Row
from deployments.model_files import BUILT_IN_MODEL, prepare_model

PARITY = "tests/e2e/test_greedy_parity.py"
GATE = (
    f"{PARITY}::test_one_at_a_time",
    f"{PARITY}::test_mixed_batches_of_eight_with_chunked_prefill",
)
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 64, 48
BATCH_SIZES = (1, 8)
NUM_RUNS = 5
MIN_RATIO = 0.95


@dataclass(frozen=True, slots=True)
class Turns:
    """Tokens per second, run by run."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]


def throughput(progress: Progress) -> list[Row]:
    """`tok_s_b1` and `tok_s_b8`: new tokens over the whole time, prefill included; medians."""
    path = prepare_model(BUILT_IN_MODEL, progress=progress).path
    progress("loading both engines")
    ours, peer = FlashEngine(path, max(BATCH_SIZES)), HuggingFace(path)
    rows = []
    for batch_size in BATCH_SIZES:
        batch = prompts(path, batch_size, NUM_PROMPT_TOKENS)
        turns = take_turns(ours, peer, batch, NUM_NEW_TOKENS, NUM_RUNS, progress)
        rows.append(
            Row(
                case=f"tok_s_b{batch_size}",
                metric=f"throughput, {NUM_PROMPT_TOKENS} tokens in, {NUM_NEW_TOKENS} out, fp32",
                unit="tok/s",
                better="higher",
                ours=statistics.median(turns.ours),
                peer=f"{peer.name} {version('transformers')}",
                peer_value=statistics.median(turns.peer),
                floor=MIN_RATIO,
                floor_of="ratio",
            )
        )
    return rows


def take_turns(
    ours: Contestant,
    peer: Contestant,
    batch: Sequence[list[int]],
    num_new_tokens: int,
    num_runs: int,
    progress: Progress,
) -> Turns:
    """One run each to warm up, then `num_runs` each, in turn. Raises MeasurementFailed when the
    tokens differ: then the times are not of the same work."""
    expected = peer.generate(batch, num_new_tokens)
    speeds: dict[str, list[float]] = {ours.name: [], peer.name: []}
    for run in range(num_runs + 1):
        for contestant in (ours, peer):
            started_s = time.perf_counter()
            completions = contestant.generate(batch, num_new_tokens)
            elapsed_s = time.perf_counter() - started_s
            if completions != expected:
                raise MeasurementFailed(
                    f"{contestant.name} made other tokens than {peer.name} in a batch of "
                    f"{len(batch)}: {completions} and {expected}"
                )
            if run:
                speeds[contestant.name].append(len(batch) * num_new_tokens / elapsed_s)
                progress(
                    f"batch {len(batch)}, run {run}, {contestant.name}: "
                    f"{speeds[contestant.name][-1]:.1f} tok/s"
                )
    return Turns(tuple(speeds[ours.name]), tuple(speeds[peer.name]))
