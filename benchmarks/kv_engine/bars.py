"""The cases of the tiered engine, and what they are held to."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.engine.cases import Case, DecodeCase
from benchmarks.engine.job import Outcome
from benchmarks.kv_engine.cases import KeptFirstTokenCase, MadeUpDecodeCase
from benchmarks.results import Row

# In this order: what is dearest to know first, and prompts of a first token before their decodes.
CASES: tuple[Case, ...] = (
    DecodeCase("step_b32_8k", 32, 8192),
    KeptFirstTokenCase("ttft_32k", 32768, num_prompts=3),
    DecodeCase("step_b8_32k", 8, 32768),
    KeptFirstTokenCase("ttft_128k", 131072, num_prompts=2),
    DecodeCase("tpot_b1_128k", 1, 131072),
    MadeUpDecodeCase("tpot_b1_1m", 1_000_000),
)
METRICS = {
    "step_b32_8k": "time of a decode step",
    "ttft_32k": "time to first token, fresh prompt",
    "step_b8_32k": "time of a decode step",
    "ttft_128k": "time to first token, fresh prompt",
    "tpot_b1_128k": "time of a decode step",
    "tpot_b1_1m": "time of a decode step, its 1,000,000 tokens of keys and values made up",
}
MAX_MS = {"step_b32_8k": 7.8, "tpot_b1_128k": 5.8, "tpot_b1_1m": 14.0}
BESIDE_EXACT = {"step_b8_32k": 1.75, "ttft_32k": 1 / 1.15, "ttft_128k": 1 / 1.15}  # least ratios
PEER_CASES = ("step_b32_8k", "tpot_b1_128k", "step_b8_32k")
FP8_PEER_CASES = ("step_b32_8k", "tpot_b1_128k")
LEAST_FIT = {"int4": 3.4, "k8v4": 2.4, "int8": 1.8}
EXACT_NAME = "flashray, exact"


def promised(name: str) -> str:
    """A case as its bar is called."""
    return f"{name}_vs_exact" if name in BESIDE_EXACT else name


def fit_named(cold_format: str) -> str:
    return f"tokens_fit_{cold_format}_vs_exact"


FITS = tuple(map(fit_named, LEAST_FIT))
NAMES = (*(promised(case.name) for case in CASES), *FITS)


def engine_rows(
    tiered: Outcome, exact: Outcome | None, peer: Outcome | None, fp8_peer: Outcome | None
) -> Iterator[Row]:
    """Medians; nothing of what has no samples of ours."""
    for name, metric in METRICS.items():
        ours = _median(tiered, name)
        if ours is None:
            continue
        if name in BESIDE_EXACT:
            value, least = _median(exact, name), BESIDE_EXACT[name]
            case = promised(name)
            yield Row(case, metric, "ms", "lower", ours, EXACT_NAME, value, least, "ratio")
        theirs = _median(peer, name)
        engine = peer.engine if peer is not None and theirs is not None else None
        if name in MAX_MS or theirs is not None:
            yield Row(name, metric, "ms", "lower", ours, engine, theirs, MAX_MS.get(name))
        theirs = _median(fp8_peer, name)
        if fp8_peer is not None and theirs is not None:
            beside = f"{metric}, beside 8-bit keys and values"
            yield Row(name, beside, "ms", "lower", ours, f"{fp8_peer.engine}, fp8", theirs)


def capacity_rows(fits: Mapping[str, Mapping[str, Any]], exact: str) -> Iterator[Row]:
    """`fits` as `benchmarks.kv_engine.capacity` says them, by format."""
    for name, least in LEAST_FIT.items():
        if name not in fits or exact not in fits:
            continue
        case, fit, in_bf16 = fit_named(name), fits[name], fits[exact]
        gib = in_bf16["kv_bytes"] / (1 << 30)
        metric = f"tokens of sequences of 64K that decode together in {gib:.1f} GiB"
        num_tokens, num_exact = fit["num_tokens"], in_bf16["num_tokens"]
        yield Row(
            case, metric, "tokens", "higher", num_tokens, EXACT_NAME, num_exact, least, "ratio"
        )
        yield Row(case, "of these bytes, on the host", "bytes", "lower", fit["host_bytes"])


def _median(outcome: Outcome | None, name: str) -> float | None:
    samples = outcome.samples.get(name) if outcome is not None else None
    return statistics.median(samples) if samples else None
