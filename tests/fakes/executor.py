"""An executor without a model: tokens are a pure function of the history, KV is checked."""

import struct
import zlib
from collections.abc import Callable, Sequence

from engine.cache.tiers import BlockRestore, BlockSpill, ColdBlock, ColdTier
from engine.outputs import SampledTokens
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import PENDING
from engine.sequence import Sequence as EngineSequence


def token_after(token_ids: Sequence[int], vocab_size: int) -> int:
    """What the fake model says after this history, whatever way its KV came about."""
    return zlib.crc32(struct.pack(f"<{len(token_ids)}I", *token_ids)) % vocab_size


def expected_completion(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """`num_tokens` tokens after `prompt`, with no stop token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(token_after(token_ids, vocab_size))
    return token_ids[len(prompt) :]


class FakeExecutor:
    """Keeps what a GPU would keep, per slot: whose KV it is, that is a digest of the tenant and of
    every token up to it. Fails the test when a sequence would read a slot that holds other KV.
    The payload of a block is the digests in its slots. A token that is pending when it is computed
    is the one that was sampled here: as on a GPU, whose tokens the next step reads there.
    """

    def __init__(
        self,
        block_size: int,
        *,
        vocab_size: int = 97,
        fail_at_step: int | None = None,
        before_step: Callable[[], object] = lambda: None,
        cold_tier: ColdTier | None = None,
    ) -> None:
        self.batches: list[ScheduledBatch] = []
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._fail_at_step = fail_at_step
        self._before_step = before_step
        self._cold_tier = cold_tier
        self._format = f"<{block_size}I"
        self._kv: dict[int, int] = {}  # slot -> digest
        self._sampled: dict[EngineSequence, tuple[int, int]] = {}  # position, token: the last

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        assert batch, "an empty batch reached the executor"
        self._before_step()
        self.batches.append(batch)
        if len(self.batches) == self._fail_at_step:
            raise RuntimeError(f"fake failure at step {self._fail_at_step}")
        self._spill(batch.spills)
        self._restore(batch.restores)
        self._store(batch)
        token_ids = tuple(
            token_after(self._history(entry), self._vocab_size) for entry in batch.sampling
        )
        for entry, token_id in zip(batch.sampling, token_ids, strict=True):
            self._sampled[entry.sequence] = entry.end, token_id
        return SampledTokens(token_ids, (None,) * len(token_ids))

    def launch(self, batch: ScheduledBatch) -> Callable[[], SampledTokens]:
        sampled = self.execute(batch)
        return lambda: sampled

    def _store(self, batch: ScheduledBatch) -> None:
        written: dict[int, int] = {}
        for entry in batch.scheduled:
            written |= self._compute(entry)
        assert len(written) == batch.num_batched_tokens, "two sequences write the same slot"
        self._kv |= written

    def _history(self, entry: ScheduledSequence) -> list[int]:
        """The tokens before the chunk's end."""
        token_ids = entry.sequence.token_ids[: entry.end]
        if token_ids[-1] == PENDING:
            position, token_ids[-1] = self._sampled[entry.sequence]
            assert position == entry.end - 1, "a pending token that was not sampled last"
        return token_ids

    def _spill(self, spills: Sequence[BlockSpill]) -> None:
        if not spills:
            return
        assert self._cold_tier is not None, "spills were planned without a cold tier"
        self._cold_tier.spill(
            [
                ColdBlock(
                    spill.tenant,
                    spill.block_hash,
                    struct.pack(self._format, *map(self._kv.__getitem__, self._block(spill))),
                )
                for spill in spills
            ]
        )

    def _restore(self, restores: Sequence[BlockRestore]) -> None:
        for restore in restores:
            (payload,) = restore.payloads
            digests = struct.unpack(self._format, payload)
            self._kv.update(zip(self._block(restore), digests, strict=True))

    def _block(self, move: BlockSpill | BlockRestore) -> range:
        start = move.block_id * self._block_size
        return range(start, start + self._block_size)

    def _compute(self, entry: ScheduledSequence) -> dict[int, int]:
        """The KV of the entry's tokens by slot, once all before them proved to be its own."""
        digests, slots = _digests(entry, self._history(entry)), self._slots(entry)
        found = [self._kv.get(slot) for slot in slots[: entry.start]]
        assert found == digests[: entry.start], (
            f"{entry.sequence.seq_id} reads foreign KV: {found} for {digests[: entry.start]}"
        )
        return dict(zip(slots[entry.start :], digests[entry.start :], strict=True))

    def _slots(self, entry: ScheduledSequence) -> list[int]:
        slots = [
            block_id * self._block_size + offset
            for block_id in entry.sequence.block_table
            for offset in range(self._block_size)
        ]
        return slots[: entry.end]


def _digests(entry: ScheduledSequence, token_ids: Sequence[int]) -> list[int]:
    digests, digest = [], zlib.crc32(entry.sequence.cache_salt)
    for token_id in token_ids:
        digest = zlib.crc32(struct.pack("<I", token_id), digest)
        digests.append(digest)
    return digests
