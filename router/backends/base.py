"""What a backend of token ids must do. `deployments` injects the local engine, tests a fake."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

from router.generation import FinishReason, GenerationRequest, TokenEvent, Usage


@dataclass(frozen=True, slots=True)
class SkippedTotals:
    """What decodes of a local engine did not read, since it started: sums over layers, sequences
    and steps, but for `greatest_certificate`. A certificate is the share of a query's softmax that
    was left out, at most."""

    cold_blocks: int = 0  # by KV head: that could be skipped
    read_blocks: int = 0  # of those: whose values were read
    heads: int = 0
    heads_again: int = 0  # of those: that had skipped too much
    queries: int = 0
    certificates: float = 0.0
    greatest_certificate: float = 0.0

    def plus(self, other: "SkippedTotals") -> "SkippedTotals":
        sums = map(sum, zip(astuple(self), astuple(other), strict=True))
        greatest = max(self.greatest_certificate, other.greatest_certificate)
        return replace(SkippedTotals(*sums), greatest_certificate=greatest)


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """A snapshot, seconds old at most. Totals count since the backend started."""

    ready: bool
    reason: str  # why it is not ready; empty when it is
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    preemptions_total: int = 0
    cold_spilled_blocks_total: int = 0  # kept in the cold tier; all zero without one
    cold_dropped_blocks_total: int = 0  # handed over and not kept
    cold_restored_blocks_total: int = 0
    cold_missed_blocks_total: int = 0  # asked for and computed after all
    cold_corrupt_blocks_total: int = 0  # of those missed: found, but not what was stored
    skipped: SkippedTotals = SkippedTotals()
    num_unaccounted: int = 0  # generations that nobody has acknowledged yet


@dataclass(frozen=True, slots=True)
class OrphanedGeneration:
    """A generation that ended with no router to account for it."""

    request_id: str
    model: str
    tenant: str
    key_id: str
    usage: Usage
    finish_reason: FinishReason


class Backend(Protocol):
    """A generation outlives its reader: `submit` starts it, `subscribe` reads it, any number of
    times and from anywhere, `abort` ends it. All raise errors of `router.errors` only."""

    async def submit(self, request: GenerationRequest) -> None:
        """Start the generation. Raises InvalidRequest when it can never run, BackendUnavailable."""

    def subscribe(
        self, request_id: str, after_index: int = 0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Yield the tokens from position `after_index` of the completion on, to the last event.

        Raises NotFound for an unknown or expired id, BackendError when the generation broke.
        """

    async def abort(self, request_id: str) -> Usage | None:
        """End the generation, free what it holds, and return its final usage; idempotent.
        None when the id is unknown or expired."""

    async def acknowledge(self, request_ids: Sequence[str]) -> None:
        """These generations have ended and are accounted for: they may be forgotten."""

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        """Ended generations that nobody has acknowledged for a while. What is claimed here is not
        given to another claimant for a while."""

    async def status(self) -> BackendStatus:
        """Never raises: what cannot be asked is not ready, with the reason."""
