"""One rank's step: inputs, forward, sampling."""

from collections.abc import Sequence as Items
from functools import partial

import torch

from engine.cache.tiers import ColdBlock, ColdTier
from engine.execution.attention import AttentionBackend
from engine.execution.block_moves import BlockMoves, moves_of
from engine.execution.block_payloads import copy_in, copy_out
from engine.execution.inputs import Chunks, build_inputs
from engine.execution.kv_tensors import KVTensors
from engine.execution.sampler import Sampler
from engine.models.decoder import Decoder
from engine.models.model_config import ModelConfig
from engine.outputs import SampledTokens
from engine.scheduling.batch import ScheduledBatch


class ModelRunner:
    """Owns the weights and the KV cache of one rank. Not thread-safe: one step at a time.

    With several ranks, `execute` on rank 0 returns when the others have called `follow` for the
    same step, and before it `move_blocks` if the step moves blocks. All raise RankLost.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVTensors,
        backend: AttentionBackend,
        sampler: Sampler,
        cold_tier: ColdTier | None = None,
    ) -> None:
        self.cold_tier = cold_tier
        self._decoder = decoder
        self._kv = kv
        self._backend = backend
        self._sampler = sampler

    @property
    def model_config(self) -> ModelConfig:
        return self._decoder.config

    @property
    def rank(self) -> int:
        return self._decoder.ranks.rank

    @property
    def num_blocks(self) -> int:
        return self._kv.num_blocks

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weights.num_bytes

    @property
    def kv_bytes(self) -> int:
        return self._kv.num_bytes

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        """Move blocks, then store the KV of every scheduled token; one token for each of
        `batch.sampling`."""
        self.move_blocks(moves_of(batch, self.rank))
        if not batch:
            return SampledTokens((), ())
        sequences = [entry.sequence for entry in batch.sampling]
        sampled = self._sampler.sample(self.forward(batch), sequences)
        if sequences and self._decoder.ranks.size > 1:
            self._decoder.ranks.broadcast(self._ids(sampled.token_ids))
        return sampled

    @torch.inference_mode()
    def move_blocks(self, moves: BlockMoves) -> None:
        """Returns once every rank has moved its own part."""
        if not moves:
            return
        if moves.spills:
            assert self.cold_tier is not None, "spills were planned without a cold tier"
            payloads = copy_out(self._kv, [spill.block_id for spill in moves.spills])
            pairs = zip(moves.spills, payloads, strict=True)
            self.cold_tier.spill([ColdBlock(s.tenant, s.block_hash, part) for s, part in pairs])
        copy_in(self._kv, moves.restored_ids, moves.payloads)
        self._decoder.ranks.minimum(0)

    @torch.inference_mode()
    def follow(self, batch: Chunks) -> list[int]:
        """Another rank's part of `execute`: the token ids that rank 0 sampled."""
        if not batch.scheduled:
            return []
        num_sampled = sum(chunk.samples for chunk in batch.scheduled)
        self.forward(batch)
        if not num_sampled:
            return []
        return self._decoder.ranks.broadcast(self._ids([0] * num_sampled)).tolist()

    @torch.inference_mode()
    def forward(self, batch: Chunks) -> torch.Tensor:
        """Raw logits [num_sampled, vocab_size] float32, in the order of the chunks that sample;
        whole on rank 0 only."""
        inputs = build_inputs(batch, self.block_size, self._decoder.weights.device)
        attend = partial(self._backend.attend, metadata=self._backend.prepare(inputs))
        hidden = self._decoder.forward(inputs.input_ids, inputs.positions, attend)
        return self._decoder.logits(hidden.index_select(0, inputs.sampled_rows))

    def _ids(self, token_ids: Items[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self._decoder.weights.device)
