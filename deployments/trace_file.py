"""A trace of attention as JSON: docs/trace.md says what a field is."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine.cache.formats import BLOCK_SIZE
from engine.execution.attention_trace import (
    NUM_FIRST,
    NUM_LAST,
    AttentionTrace,
    DemotedBlocks,
    Masses,
    TracedStep,
)

VERSION = 1
DIGITS = 6  # of a mass


def trace_json(trace: AttentionTrace, heading: Mapping[str, object]) -> str:
    """A line a step."""
    head = {
        "version": VERSION,
        **heading,
        "num_prompt_tokens": trace.num_prompt_tokens,
        "token_ids": trace.token_ids,
        "block_size": BLOCK_SIZE,
        "layer_groups": trace.layer_groups,
    }
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    steps = [json.dumps(_step(step), separators=(",", ":")) for step in trace.steps]
    fields.append('"steps": [\n' + ",\n".join(steps) + "\n]")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _step(step: TracedStep) -> dict[str, Any]:
    fields = {
        "position": step.position,
        "is_decode": step.is_decode,
        "runs": [[asdict(run) for run in runs] for runs in step.runs],
        "demoted": [[_demoted(each) for each in demoted] for demoted in step.demoted],
        "mass": _rounded(step.masses),
        f"mass_of_first_{NUM_FIRST}": _rounded(step.first_masses),
        f"mass_of_last_{NUM_LAST}": _rounded(step.last_masses),
    }
    if step.certificates is not None:
        fields["certificate"] = step.certificates.shares.astype(float).tolist()
        fields["left_out"] = step.certificates.left_out.tolist()
    return fields


def _demoted(blocks: DemotedBlocks) -> dict[str, Any]:
    return {
        "part": blocks.part.name.lower(),
        "source_format": blocks.source_format.name.lower(),
        "target_format": blocks.target_format.name.lower(),
        "num_blocks": blocks.num_blocks,
    }


def _rounded(masses: Masses) -> Any:
    return masses.astype(float).round(DIGITS).tolist()
