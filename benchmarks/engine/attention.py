"""`python -m benchmarks.engine.attention OUT.json CASE...`: our decode kernel beside that of
FlashAttention 3, and the copy rate of the same GPU in the same minutes. In a process of its own, as
the engines are.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.gpu_process import end_with_parent
from benchmarks.errors import MeasurementFailed
from benchmarks.kernels.attention import BLOCK_SIZE, attention_cases
from benchmarks.kernels.case import Arguments, Case
from benchmarks.kernels.timing import copy_bytes_per_us, graph_us
from engine.execution.flash_attention import find_flash_attention

CASES = ("attn_b32_8k", "attn_b1_128k")
PEER_RTOL = 2e-2  # of the largest value: the peer's rounding is its own


def main() -> None:
    end_with_parent()
    file = Path(sys.argv[1])
    measured: dict[str, Any] = {"copy_bytes_per_us": copy_bytes_per_us()}
    file.write_text(json.dumps(measured))
    for name, ours_us, peer_us, why in attention_times(sys.argv[2:]):
        measured[name] = {"ours_us": ours_us, "peer_us": peer_us, "peer_failed": why}
        print(f"  {name}: {measured[name]}", file=sys.stderr, flush=True)
        file.write_text(json.dumps(measured))


def attention_times(names: Sequence[str]) -> Iterator[tuple[str, float, float | None, str | None]]:
    """(case, ours, FlashAttention 3's, why it has none). Raises MeasurementFailed."""
    for case in attention_cases():
        if case.name not in names:
            continue
        case.check(case.ours)
        sets = case.argument_sets()
        ours_us = graph_us(lambda index, sets=sets, case=case: case.ours(*sets[index % len(sets)]))
        try:
            yield case.name, ours_us, flash_attention_us(case, sets), None
        except (RuntimeError, MeasurementFailed) as exc:
            yield case.name, ours_us, None, f"{type(exc).__name__}: {exc}"
        torch.cuda.empty_cache()


def flash_attention_us(case: Case, sets: list[Arguments]) -> float:
    """Raises MeasurementFailed where it is not to be had, or its result is another one."""
    module, reason = find_flash_attention()
    if module is None:
        raise MeasurementFailed(reason)
    attend = module.flash_attn_varlen_func
    calls = [partial(attend, **options_of(arguments)) for arguments in sets]
    expected = case.ours(*sets[0]).float()
    worst = (calls[0]().float() - expected).abs().max() / expected.abs().max()
    if not worst <= PEER_RTOL:
        raise MeasurementFailed(f"FlashAttention 3 differs from ours by {worst:.3g} of the largest")
    return graph_us(lambda index: calls[index % len(calls)]())


def options_of(arguments: Arguments) -> dict[str, Any]:
    """As vLLM has them at hand when it calls: integers in int32, an output that is there."""
    query, key_cache, value_cache, block_tables, context_lens, scale = arguments
    return {
        "q": query,
        "k": key_cache,
        "v": value_cache,
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.arange(len(query) + 1, dtype=torch.int32, device=query.device),
        "max_seqlen_k": block_tables.shape[1] * BLOCK_SIZE,
        "seqused_k": context_lens.int(),
        "block_table": block_tables.int(),
        "softmax_scale": scale,
        "causal": True,
        "fa_version": 3,
        "out": torch.empty_like(query),
    }


if __name__ == "__main__":
    main()
