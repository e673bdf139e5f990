"""One rank's step: inputs, forward, sampling."""

from collections.abc import Sequence as Items
from functools import partial

import torch

from engine.cache.formats import BLOCK_SIZE
from engine.cache.tier_group import TierGroup
from engine.cache.tiers import ColdBlock, ColdTier
from engine.execution.attention import AttentionBackend
from engine.execution.block_moves import BlockMoves, moves_of
from engine.execution.block_payloads import copy_in, copy_out
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.drawn_tokens import DrawnTokens
from engine.execution.inputs import Chunks
from engine.execution.kv_tensors import KVTensors
from engine.execution.layer_graphs import LayerGraphs
from engine.execution.sampler import Sampler
from engine.execution.sequence_slots import Slots
from engine.execution.skip_counts import SkipCounter
from engine.execution.stored_keys import stored_keys
from engine.execution.tiered_attention import TieredAttention
from engine.execution.tiered_kv import TieredKV
from engine.execution.tracing_attention import TracingAttention
from engine.execution.uploads import upload
from engine.models.decoder import Decoder
from engine.models.model_config import ModelConfig
from engine.outputs import PendingTokens, SampledTokens, SkipCounts
from engine.scheduling.batch import ScheduledBatch
from engine.sequence import PENDING, Sequence


class ModelRunner:
    """Owns the weights and the KV cache of one rank. Not thread-safe: one step at a time.

    With several ranks, `execute` on rank 0 returns when the others have called `follow` for the
    same step, and before it `move_blocks` if the step moves blocks. All raise RankLost.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVTensors | TieredKV,
        backend: AttentionBackend,
        sampler: Sampler,
        cold_tier: ColdTier | None = None,
        slots: Slots | None = None,
        graphs: DecodeGraphs | None = None,
        layer_graphs: LayerGraphs | None = None,
    ) -> None:
        """`slots` are needed for a launch with pending tokens, and for `graphs`."""
        self.cold_tier = cold_tier
        self._decoder = decoder
        self._kv = kv
        self._backend = backend
        self._sampler = sampler
        self._slots = slots
        self._graphs = graphs
        self._layer_graphs = layer_graphs

    @property
    def model_config(self) -> ModelConfig:
        return self._decoder.config

    @property
    def rank(self) -> int:
        return self._decoder.ranks.rank

    @property
    def is_asynchronous(self) -> bool:
        """A launch may hold pending tokens."""
        return self._slots is not None

    @property
    def num_blocks(self) -> int:
        """Of a cache that is not tiered."""
        return self._paged.num_blocks

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE if self.tier_groups else self._paged.block_size

    @property
    def tier_groups(self) -> tuple[TierGroup, ...]:
        """Of a tiered cache; another has none."""
        return self._kv.groups if isinstance(self._kv, TieredKV) else ()

    @property
    def _paged(self) -> KVTensors:
        assert isinstance(self._kv, KVTensors), "a tiered cache has no blocks of one size"
        return self._kv

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weights.num_bytes

    @property
    def kv_bytes(self) -> int:
        return self._kv.num_bytes

    @property
    def skipped(self) -> SkipCounts:
        """What decodes have left out, up to a step or two ago."""
        return SkipCounts() if self._skip_counter is None else self._skip_counter.latest

    def count_skipped_anew(self) -> None:
        if self._skip_counter is not None:
            self._skip_counter.reset()

    @property
    def _skip_counter(self) -> SkipCounter | None:
        if not isinstance(self._backend, TieredAttention) or self._backend.skipping is None:
            return None
        return self._backend.skipping.counter

    def traced(self) -> tuple["ModelRunner", TracingAttention]:
        """The same weights and the same cache, without graphs, and a record of what the attention
        of each step looks at. Only one of both runners may be used."""
        windows, scale = self.model_config.sliding_windows, self.model_config.head_dim**-0.5
        stored = stored_keys(self._kv, windows)
        tracing = TracingAttention(self._backend, stored, windows, scale)
        runner = ModelRunner(
            self._decoder, self._kv, tracing, self._sampler, self.cold_tier, self._slots
        )
        return runner, tracing

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        """Move blocks, then store the KV of every scheduled token; one token for each of
        `batch.sampling`."""
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        """As `execute`, without waiting for the device, unless the batch moves blocks. Tokens of
        the last launch may be pending in this one, on one rank."""
        self.move_blocks(moves_of(batch, self.rank))
        if not batch:
            return DrawnTokens.of(self._ids([]), []).wait
        drawn = self._draw(batch) if self._slots is None else self._draw_ahead(batch, self._slots)
        if drawn.num_tokens and self._decoder.ranks.size > 1:
            self._decoder.ranks.broadcast(self._ids(drawn.wait().token_ids))
        return drawn.wait

    @torch.inference_mode()
    def move_blocks(self, moves: BlockMoves) -> None:
        """Returns once every rank has moved its own part."""
        if not moves:
            return
        if moves.spills:
            assert self.cold_tier is not None, "spills were planned without a cold tier"
            payloads = copy_out(self._paged, [spill.block_id for spill in moves.spills])
            pairs = zip(moves.spills, payloads, strict=True)
            self.cold_tier.spill([ColdBlock(s.tenant, s.block_hash, part) for s, part in pairs])
        copy_in(self._paged, moves.restored_ids, moves.payloads)
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
    def forward(self, batch: Chunks, last_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Raw logits [num_sampled, vocab_size] float32, in the order of the chunks that sample;
        whole on rank 0 only. last_tokens [num_sampled] int64: what was sampled last for each of
        these, and stands for a newest token that is pending."""
        inputs = self._backend.build_inputs(batch)
        if last_tokens is not None:
            newest = inputs.input_ids.index_select(0, inputs.sampled_rows)
            newest = torch.where(newest == PENDING, last_tokens, newest)
            inputs.input_ids.index_copy_(0, inputs.sampled_rows, newest)
        metadata = self._backend.prepare(inputs)
        if self._layer_graphs is not None and self._layer_graphs.fits(inputs):
            return self._decoder.logits(self._layer_graphs.forward(inputs, metadata))
        attend = partial(self._backend.attend, metadata=metadata)
        normed = self._decoder.forward(
            inputs.input_ids, inputs.positions, attend, inputs.sampled_rows
        )
        return self._decoder.logits(normed)

    def _draw(self, batch: ScheduledBatch) -> DrawnTokens:
        return self._sampler.draw(self.forward(batch), _sequences_of(batch))

    def _draw_ahead(self, batch: ScheduledBatch, slots: Slots) -> DrawnTokens:
        placed = slots.place(batch.scheduled)
        if self._graphs is not None and self._graphs.fits(batch):
            step = self._graphs.run(batch, placed)
            drawn = self._sampler.draw(step.logits, _sequences_of(batch), step.chosen)
            if drawn.token_ids is not step.chosen:
                slots.keep(step.slots, drawn.token_ids)
            return drawn
        pairs = zip(batch.scheduled, placed, strict=True)
        sampling = upload([slot for entry, slot in pairs if entry.samples], slots.device)
        logits = self.forward(batch, slots.last_tokens.index_select(0, sampling))
        drawn = self._sampler.draw(logits, _sequences_of(batch))
        slots.keep(sampling, drawn.token_ids)
        return drawn

    def _ids(self, token_ids: Items[int]) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self._decoder.weights.device)


def _sequences_of(batch: ScheduledBatch) -> list[Sequence]:
    return [entry.sequence for entry in batch.sampling]
