"""How long keys can be, whatever the tokens: what the weights of a model say of that."""

import torch

from engine.models.decoder import Decoder
from engine.models.quantization import Linear
from kernels.fp8_linear.api import Fp8Linear

ROUNDING = 1.125  # more than numbers of 8 bits, and sums of them, make a vector longer


def key_lengths(decoder: Decoder) -> torch.Tensor:
    """[num_layers, num_kv_heads] float32: no turned key is longer than that.

    A key is W D x + b, x of a length of at most sqrt(hidden_size) as the norm leaves it, D the
    norm's weights; so its length is at most |W D| sqrt(hidden_size) + |b|, of the spectral norm. A
    key that is normed itself has at most its own norm's greatest weight times sqrt(head_dim).
    """
    config, layers = decoder.config, decoder.weights.layers
    found = []
    for layer in layers:
        if layer.k_norm is not None:
            length = layer.k_norm.double().abs().max() * config.head_dim**0.5
            found.append(length.expand(config.num_kv_heads))
            continue
        heads = slice(config.num_heads, config.num_heads + config.num_kv_heads)
        rows = _dense(layer.qkv).unflatten(0, (-1, config.head_dim))[heads].double()
        rows = rows * layer.input_norm.double()
        squares = torch.linalg.eigvalsh((rows @ rows.transpose(1, 2)).cpu()).amax(-1)
        lengths = squares.clamp_min(0).sqrt().to(rows.device) * config.hidden_size**0.5
        if layer.qkv.bias is not None:
            bias = layer.qkv.bias.unflatten(0, (-1, config.head_dim))[heads]
            lengths = lengths + bias.double().norm(dim=-1)
        found.append(lengths)
    return (torch.stack(found) * (ROUNDING * decoder.rope.scaling)).float()


def _dense(linear: Linear) -> torch.Tensor:
    if isinstance(linear, Fp8Linear):
        return linear.weight.float() * linear.scales[:, None]
    return linear.weight.to_dense() if linear.is_packed else linear.weight
