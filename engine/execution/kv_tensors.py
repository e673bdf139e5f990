"""The KV cache of one rank: a key and a value tensor for each layer."""

from dataclasses import dataclass
from typing import Self

import torch

from engine.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVTensors:
    """Per layer `[num_blocks, block_size, num_kv_heads, head_dim]`.

    Zeroed at the start and only ever overwritten by finite values: attention multiplies slots it
    must not see by zero, and zero times NaN is NaN.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

        def allocate_layers() -> tuple[torch.Tensor, ...]:
            layers = range(config.num_layers)
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in layers)

        return cls(allocate_layers(), allocate_layers())

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks of {self.block_size} tokens"

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.keys, *self.values)

    @property
    def block_shape(self) -> torch.Size:
        return self.keys[0].shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)

    @property
    def block_bytes(self) -> int:
        return self.num_bytes // self.num_blocks


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of all layers."""
    num_elements = 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim
    return num_elements * dtype.itemsize


def num_blocks_for(
    kv_cache_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype
) -> int:
    return kv_cache_bytes // block_bytes(config, block_size, dtype)
