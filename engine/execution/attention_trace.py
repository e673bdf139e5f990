"""What the queries of one sequence look at, and what of its cache they read, step by step."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.cache.formats import BLOCK_SIZE, Format, Part

EXACT = "exact"
TIERS = ("sink", "cold", "warm", "hot")
NUM_FIRST, NUM_LAST = 4, 256  # tokens of whose mass there is a sum of its own

Masses = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TierRun:
    """Tokens [start, end) of one of TIERS, or, EXACT, all that are seen. `num_bytes`: of their keys
    and values in one layer, as they are stored, metadata included."""

    tier: str
    start: int
    end: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DemotedBlocks:
    """Blocks of keys, or of values, that a layer has written anew in a denser format."""

    part: Part
    source_format: Format
    target_format: Format
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Certificates:
    """Of a decode that may leave values out. shares [num_layers, num_heads]: no more of a query
    head's softmax was. left_out [num_layers, num_kv_heads]: blocks whose values were not read."""

    shares: Masses
    left_out: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What the newest token saw, at `position`, itself included.

    `runs` and `demoted` by layer group; `demoted` since the step before. `masses` [num_layers,
    num_kv_heads, num_blocks]: the part of the softmax that falls on the tokens of a block, a mean
    over the query heads that share the keys: 1 in sum over blocks. `first_masses`, `last_masses`
    [num_layers, num_kv_heads]: on the first NUM_FIRST tokens, and on the last NUM_LAST.
    `certificates`: None of a step that read all it saw.
    """

    position: int
    is_decode: bool
    runs: tuple[tuple[TierRun, ...], ...]
    demoted: tuple[tuple[DemotedBlocks, ...], ...]
    masses: Masses
    first_masses: Masses
    last_masses: Masses
    certificates: Certificates | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.masses.shape[2])


@dataclass(frozen=True)
class AttentionTrace:
    """`layer_groups`: the layers whose tokens are stored alike. `token_ids`: what was sampled, one
    a step; the first step is that of the prompt's last token."""

    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    layer_groups: tuple[tuple[int, ...], ...]
    steps: tuple[TracedStep, ...]

    @property
    def decodes(self) -> tuple[TracedStep, ...]:
        return self.steps[1:]

    @property
    def num_layers(self) -> int:
        return len(self.steps[0].masses)

    @property
    def tiers(self) -> tuple[str, ...]:
        """In the order of tokens."""
        return tuple(run.tier for run in self.steps[-1].runs[0])

    def runs(self, step: TracedStep, layer: int) -> tuple[TierRun, ...]:
        group = next(nth for nth, layers in enumerate(self.layer_groups) if layer in layers)
        return step.runs[group]

    @cached_property
    def by_block(self) -> Masses:
        """[num_steps, num_layers, num_blocks], a mean over heads: 0 where no token was yet."""
        found = np.zeros((len(self.steps), self.num_layers, self.steps[-1].num_blocks), np.float32)
        for row, step in zip(found, self.steps, strict=True):
            row[:, : step.num_blocks] = step.masses.mean(1)
        return found

    def by_tier(self, step: TracedStep) -> Masses:
        """[num_layers, num_tiers], a mean over heads."""
        found = np.zeros((self.num_layers, len(self.tiers)), np.float32)
        masses = step.masses.mean(1)
        for layers, runs in zip(self.layer_groups, step.runs, strict=True):
            for nth, run in enumerate(runs):
                blocks = slice(run.start // BLOCK_SIZE, -(-run.end // BLOCK_SIZE))
                found[list(layers), nth] = masses[list(layers), blocks].sum(1)
        return found

    def num_bytes(self, step: TracedStep) -> dict[str, int]:
        """By tier, in all layers."""
        found = dict.fromkeys(self.tiers, 0)
        for layers, runs in zip(self.layer_groups, step.runs, strict=True):
            for run in runs:
                found[run.tier] += len(layers) * run.num_bytes
        return found
