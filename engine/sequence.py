"""One sequence in the engine: its tokens, and how far its KV has been computed."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from engine.grammar import GrammarState
from engine.outputs import Usage
from engine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, and owned by the scheduler alone.

    Invariants, held by `check_integrity` of the scheduler:
    `num_computed_tokens < len(token_ids)` while not finished (the newest token has no KV yet);
    `len(block_table) * block_size >= num_computed_tokens`; a waiting sequence owns no block.
    """

    seq_id: str
    token_ids: list[int]  # the prompt, then the completion
    num_prompt_tokens: int
    params: SamplingParams
    cache_salt: bytes = b""
    priority: int = 0  # smaller runs first
    arrival_index: int = 0  # dense order of arrival: age without a clock
    arrival_s: float = 0.0  # on the scheduler's clock, which runs while steps do
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, in order
    num_computed_tokens: int = 0  # tokens whose KV is in the cache
    num_cached_tokens: int = 0  # prompt tokens whose KV was found at the first admission
    num_preemptions: int = 0
    grammar_state: GrammarState | None = None  # after the tokens so far; a preemption keeps both

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Everything but the newest token is in the cache, and the prompt is done."""
        return self.num_uncomputed_tokens == 1 and self.num_completion_tokens > 0

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_completion_tokens)
