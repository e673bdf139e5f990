"""How much of a GPU's memory keys and values may take."""

import logging
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import CacheTooSmall
from engine.execution.decode_graphs import padded_sizes
from engine.execution.layer_graphs import layer_sizes
from engine.models.decoder import Decoder

GIB = 1 << 30
GRAPH_RESULTS = 4  # buffers as large as the logits that each recorded step keeps
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of one GPU. `others`: weights, and whatever else was there."""

    total: int
    others: int
    activations: int  # of the largest step
    graphs: int
    kept_free: int
    pages: int = 0  # that prompts attend over, where tokens age
    skips: int = 0  # what decodes keep of what they skip

    @property
    def kv_cache(self) -> int:
        used = self.others + self.activations + self.graphs + self.pages + self.skips
        return self.total - used - self.kept_free

    def __str__(self) -> str:
        pages = f"+ pages of prompts {self.pages / GIB:.1f} " if self.pages else ""
        skips = f"+ skip lists {self.skips / GIB:.1f} " if self.skips else ""
        return (
            f"{self.total / GIB:.1f} GiB = weights and others {self.others / GIB:.1f} + largest "
            f"step {self.activations / GIB:.1f} + graphs {self.graphs / GIB:.1f} {pages}{skips}+ "
            f"kept free {self.kept_free / GIB:.1f} + KV cache {self.kv_cache / GIB:.1f}"
        )


@torch.inference_mode()
def profile_memory(
    config: EngineConfig, decoder: Decoder, pages: int = 0, skips: int = 0
) -> MemoryProfile:
    """Computes the largest step once, without attention, whose own scratch is small but for
    `pages` and `skips`, bytes that are allocated later. Raises CacheTooSmall."""
    device = decoder.weights.device
    num_tokens = config.scheduler.max_num_batched_tokens
    num_rows = min(config.scheduler.max_num_sequences, num_tokens)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    normed = decoder.forward(token_ids, token_ids, lambda layer, query, *others: query.clone())
    decoder.logits(normed[:num_rows])
    activations = torch.cuda.max_memory_allocated(device) - before
    del normed
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    vocab_bytes = decoder.config.vocab_size * torch.float32.itemsize
    decodes = sum(padded_sizes(config.scheduler.max_num_sequences)) * vocab_bytes * GRAPH_RESULTS
    layers = activations * max(layer_sizes(num_tokens)) // num_tokens
    profile = MemoryProfile(
        total=total,
        others=total - free,
        activations=activations,
        graphs=decodes + layers,
        kept_free=int(total * (1 - config.cache.gpu_memory_utilization)),
        pages=pages,
        skips=skips,
    )
    logger.info("memory of %s: %s", device, profile)
    if profile.kv_cache <= 0:
        raise CacheTooSmall(
            f"no memory is left on {device} for keys and values: {profile}; raise "
            "gpu_memory_utilization, or lower max_num_batched_tokens"
        )
    return profile
