"""One rank's step: inputs, forward, sampling."""

from functools import partial

import torch

from engine.execution.attention import AttentionBackend
from engine.execution.inputs import build_inputs
from engine.execution.kv_tensors import KVTensors
from engine.execution.sampler import Sampler
from engine.models.decoder import Decoder
from engine.models.model_config import ModelConfig
from engine.outputs import SampledTokens
from engine.scheduling.batch import ScheduledBatch


class ModelRunner:
    """Owns weights and KV cache. Not thread-safe: one step at a time."""

    def __init__(
        self, decoder: Decoder, kv: KVTensors, backend: AttentionBackend, sampler: Sampler
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._backend = backend
        self._sampler = sampler

    @property
    def model_config(self) -> ModelConfig:
        return self._decoder.config

    @property
    def num_blocks(self) -> int:
        return self._kv.num_blocks

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        """Store the KV of every scheduled token; one token for each of `batch.sampling`."""
        sequences = [entry.sequence for entry in batch.sampling]
        return self._sampler.sample(self.forward(batch), sequences)

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Raw logits [num_sampled, vocab_size] float32, in the order of `batch.sampling`."""
        inputs = build_inputs(batch, self.block_size, self._decoder.weights.device)
        attend = partial(self._backend.attend, metadata=self._backend.prepare(inputs))
        hidden = self._decoder.forward(inputs.input_ids, inputs.positions, attend)
        return self._decoder.logits(hidden.index_select(0, inputs.sampled_rows))
