"""The rotation of values, folded into the weights: a cache then holds rotated values for nothing.

Each KV head's rows of the value projection are rotated, and each query head's columns of the output
projection: the rotation is its own inverse, and what a layer gives is what it was.
"""

import torch

from engine.errors import UnsupportedModel
from engine.models.model_config import ModelConfig
from engine.models.quantization import Linear, Pack
from kernels.tiered_append.hadamard import is_rotatable, rotated


def refuse_unrotatable(head_dim: int) -> None:
    """Raises UnsupportedModel where no rotation of heads is known."""
    if not is_rotatable(head_dim):
        raise UnsupportedModel(
            "a tiered cache rotates heads, whose head_dim must be a power of two, this model's is "
            f"{head_dim}; choose exact"
        )


def rotate_values(qkv: torch.Tensor, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """qkv: a weight [out_size, in_size] or a bias [out_size], of queries, keys, values -> a copy
    whose values are rotated, in float32 and rounded once. Raises UnsupportedModel."""
    refuse_unrotatable(head_dim)
    num_values = num_kv_heads * head_dim
    others, values = qkv.split((len(qkv) - num_values, num_values))
    columns = values.float().view(num_kv_heads, head_dim, -1).transpose(1, 2)
    rows = rotated(columns).transpose(1, 2).reshape(values.shape)
    return torch.cat((others, rows.to(qkv.dtype)))


def rotate_output(output: torch.Tensor, head_dim: int) -> torch.Tensor:
    """output [hidden_size, num_heads * head_dim] -> a copy that takes rotated heads, in float32 and
    rounded once. Raises UnsupportedModel."""
    refuse_unrotatable(head_dim)
    heads = output.float().unflatten(1, (-1, head_dim))
    return rotated(heads).flatten(1).to(output.dtype)


def packs_of_rotated(pack: Pack, local: ModelConfig) -> tuple[Pack, Pack]:
    """`pack` for the queries, keys, values of a layer, and for its output projection, of the heads
    of `local`, so that values come rotated. Both raise UnsupportedModel."""

    def rotate(qkv: torch.Tensor) -> torch.Tensor:
        return rotate_values(qkv, local.num_kv_heads, local.head_dim)

    def pack_qkv(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return pack(rotate(weight), None if bias is None else rotate(bias))

    def pack_output(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return pack(rotate_output(weight, local.head_dim), bias)

    return pack_qkv, pack_output
