"""One sequence in the engine: its tokens, and how far its KV has been computed."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from engine.cache.block_hash import extend_chain, root_hash
from engine.grammar import GrammarState
from engine.outputs import Usage
from engine.sampling_params import SamplingParams

PENDING = -1  # stands in `token_ids` for a token that a step in flight samples


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
    """Mutable, and owned by the scheduler alone. What it says holds once the planned steps are
    done: a planned token counts as computed, and one to be sampled is there, `PENDING`.

    Invariants, held by `check_integrity` of the scheduler:
    `num_computed_tokens < len(token_ids)` while not finished (the newest token has no KV yet; with
    no token to sample, all are computed in the last step);
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
    num_pending_tokens: int = 0  # the last of `token_ids`
    num_cached_tokens: int = 0  # prompt tokens whose KV was found at the first admission
    num_preemptions: int = 0
    grammar_state: GrammarState | None = None  # after the tokens so far; a preemption keeps both

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) - self.num_pending_tokens

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
    def sampled_position(self) -> int:
        """Of the token that the newest planned step samples, or the next would."""
        return len(self.token_ids) - (self.num_pending_tokens > 0)

    @property
    def awaits_history(self) -> bool:
        """Its next token depends on tokens that are pending, by more than attention."""
        is_bound = self.params.has_penalties or self.grammar_state is not None
        return is_bound and self.num_pending_tokens > 0

    @property
    def is_planned_out(self) -> bool:
        """The planned steps compute and sample all that may be: there is no other to plan."""
        most = self.params.max_tokens
        return self.num_completion_tokens == most and self.num_uncomputed_tokens <= min(1, most)

    @property
    def usage(self) -> Usage:
        num_completion_tokens = self.num_known_tokens - self.num_prompt_tokens
        return Usage(self.num_prompt_tokens, self.num_cached_tokens, num_completion_tokens)

    def hash_blocks(self, address: bytes, block_size: int) -> None:
        """Of the full blocks of what is known by now. `address` names the model and the format of
        its cache. Idempotent."""
        root = root_hash(address, self.cache_salt)
        extend_chain(self.block_hashes, root, self.token_ids, block_size, self.num_known_tokens)

    def expect_token(self) -> None:
        self.token_ids.append(PENDING)
        self.num_pending_tokens += 1

    def book_token(self, token_id: int) -> None:
        """The first that was expected is this."""
        self.token_ids[self.num_known_tokens] = token_id
        self.num_pending_tokens -= 1

    def drop_pending(self) -> None:
        del self.token_ids[self.num_known_tokens :]
        self.num_pending_tokens = 0
