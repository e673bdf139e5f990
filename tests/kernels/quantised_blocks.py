"""Blocks as a quantising kernel must take them: channels and tokens of many sizes, anywhere in an
arena, NaN in every slab and slot that nothing names."""

import torch

from kernels.kv_quantise import reference
from kernels.kv_quantise.api import quantise_keys, quantise_values
from kernels.kv_quantise.layout import slabs_of_block

KINDS = {
    "keys": (quantise_keys, reference.quantise_keys),
    "values": (quantise_values, reference.quantise_values),
}
# From how many bits, to how many, slabs of a slot.
FORMS = (*((*each, 1) for each in reference.FROM_TO_BITS), (16, 8, 2))
CODECS = {
    "keys": (reference.quantised_keys, reference.dequantised_keys, -2),
    "values": (reference.quantised_values, reference.dequantised_values, -1),
}


def tokens(num_blocks: int, heads: int, size: int, seed: int = 0) -> torch.Tensor:
    """[num_blocks, heads, 64, size] bfloat16, of channels and tokens of many sizes and offsets."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(num_blocks, heads, 64, size, generator=generator)
    exact *= torch.rand(64, 1, generator=generator) * 3
    exact = exact * torch.rand(size, generator=generator) * 3
    exact += 4 * torch.randn(size, generator=generator)
    exact[..., 0], exact[:, :, 0], exact[..., 1] = 0, 0, -3.5
    exact[..., 2] *= 2.0**17
    return exact.bfloat16()


def arena(
    kind: str, from_bits: int, size: int, num_blocks: int = 2, grain: int = 1
) -> tuple[torch.Tensor, ...]:
    """Blocks among slabs of NaN: slabs, metadata, sources, and places for targets."""
    num_slabs, heads = 12 * num_blocks, 2
    slabs = torch.full((num_slabs, heads, 16 * size), float("nan")).bfloat16().view(torch.uint8)
    meta_size = size if kind == "keys" else 64
    num_slots = num_slabs // grain
    meta = torch.full((num_slots, heads, 2, meta_size), float("nan"), dtype=torch.float16)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1)).int()
    order = (slots[:, None] * grain + torch.arange(grain).int()).flatten()
    width = slabs_of_block(from_bits)
    sources, others = order[: num_blocks * width].view(-1, width), order[num_blocks * width :]
    exact = tokens(num_blocks, heads, size)
    if from_bits == 16:
        stored = exact.transpose(1, 2).reshape(num_blocks, width, 16, heads, size)
        slabs[sources.long()] = (
            stored.contiguous().view(torch.uint8).reshape(num_blocks, width, heads, -1)
        )
    else:
        packed = CODECS[kind][0](exact, from_bits, grain)
        slabs[sources.long()] = packed.bytes.transpose(1, 2)
        meta[sources[:, ::grain].long() // grain] = packed.meta.transpose(1, 2)
    return slabs, meta, sources, others
