"""The kernels of the language model at the sizes of an 8B Llama, large batches and decodes."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Arguments, Case
from kernels.kv_append.api import kv_append
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rms_norm.api import rms_norm
from kernels.rope_append.api import rope_append
from kernels.rotary import reference as rotary_reference
from kernels.rotary.api import rotary
from kernels.silu_mul import reference as silu_mul_reference
from kernels.silu_mul.api import silu_mul
from kernels.tiered_append.api import tiered_append
from kernels.tiered_append.hadamard import rotated
from kernels.tiered_append.reference import turned

DTYPE = torch.bfloat16
ITEM_BYTES = 2
HIDDEN, INTERMEDIATE, HEAD_DIM = 4096, 14336, 128
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
ROUNDINGS = 2 * torch.finfo(DTYPE).eps
EPS = 1e-5
SMALL = (1, 32)  # tokens


def language_cases() -> Iterator[Case]:
    """Large ones move 130 to 270 MB, the decodes stay within the L2."""
    for num_tokens in (16384, 4096, *SMALL):
        yield _rms_norm(num_tokens)
    for num_tokens in (8192, *SMALL):
        yield _rms_norm_residual(num_tokens)
    for num_tokens in (3072, *SMALL):
        yield _silu_mul(num_tokens)
    for num_tokens in (8192, *SMALL):
        yield _rotary(num_tokens)
    for num_tokens in (32768, 8192, *SMALL):
        yield _kv_append(num_tokens)
    for num_tokens in (32768, *SMALL):
        yield _rope_append(num_tokens)
    for num_tokens in (32768, *SMALL):
        yield _tiered_append(num_tokens)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def _name(op: str, num_tokens: int, main_tokens: int) -> str:
    return op if num_tokens == main_tokens else f"{op}, {num_tokens} tokens"


def _rms_norm(num_tokens: int) -> Case:
    def native(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    return Case(
        _name("rms_norm", num_tokens, 16384),
        f"{num_tokens} x {HIDDEN} bfloat16",
        rms_norm,
        rms_norm_reference.rms_norm,
        lambda: (_normal(num_tokens, HIDDEN), _normal(HIDDEN), EPS),
        num_bytes=ITEM_BYTES * HIDDEN * (2 * num_tokens + 1),
        rtol=ROUNDINGS,
        atol=1e-6,
        is_large=num_tokens not in SMALL,
        peers={"torch.nn.functional.rms_norm": native},
    )


def _rms_norm_residual(num_tokens: int) -> Case:
    def arguments() -> Arguments:
        x, residual = _normal(num_tokens, HIDDEN), _normal(num_tokens, HIDDEN).float()
        return x, _normal(HIDDEN), EPS, residual

    return Case(
        _name("rms_norm_residual", num_tokens, 8192),
        f"{num_tokens} x {HIDDEN} bfloat16, residual float32",
        rms_norm,
        rms_norm_reference.rms_norm,
        arguments,
        num_bytes=ITEM_BYTES * HIDDEN * (6 * num_tokens + 1),
        rtol=ROUNDINGS,
        atol=1e-6,
        is_large=num_tokens not in SMALL,
    )


def _silu_mul(num_tokens: int) -> Case:
    return Case(
        _name("silu_mul", num_tokens, 3072),
        f"{num_tokens} x 2 x {INTERMEDIATE} bfloat16",
        silu_mul,
        silu_mul_reference.silu_mul,
        lambda: (_normal(num_tokens, 2 * INTERMEDIATE),),
        num_bytes=ITEM_BYTES * INTERMEDIATE * 3 * num_tokens,
        rtol=ROUNDINGS,
        atol=1e-6,
        is_large=num_tokens not in SMALL,
    )


def _turns(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 3 * torch.randn(num_tokens, 1, HEAD_DIM, device="cuda")
    return angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def _rotary(num_tokens: int) -> Case:
    num_heads = NUM_HEADS + NUM_KV_HEADS

    def arguments() -> Arguments:
        fused = _normal(num_tokens, num_heads + NUM_KV_HEADS, HEAD_DIM)
        return fused[:, :num_heads], *_turns(num_tokens)

    return Case(
        _name("rotary", num_tokens, 8192),
        f"{num_tokens} x {num_heads} x {HEAD_DIM} bfloat16 of a fused projection",
        rotary,
        rotary_reference.rotary,
        arguments,
        num_bytes=ITEM_BYTES * num_tokens * HEAD_DIM * (2 * num_heads + 2),
        rtol=ROUNDINGS,
        atol=ROUNDINGS,
        is_large=num_tokens not in SMALL,
    )


def _append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As one would write it in torch: the reference also looks for tokens without a slot, for
    which the host would have to wait."""
    key_cache.flatten(0, 1)[slot_mapping] = key
    value_cache.flatten(0, 1)[slot_mapping] = value


def _append_turned(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    _append(rotary_reference.rotary(key, cos, sin), value, key_cache, value_cache, slot_mapping)
    return rotary_reference.rotary(query, cos, sin)


def _projected(num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    fused = _normal(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    return fused.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)


def _caches_and_slots(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks are scattered, the slots of one follow each other, as after a prefill."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache_shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    blocks = torch.randperm(num_blocks, device="cuda")[:, None] * BLOCK_SIZE
    slots = (blocks + torch.arange(BLOCK_SIZE, device="cuda")).flatten()[:num_tokens]
    return _normal(*cache_shape), _normal(*cache_shape), slots.contiguous()


def _kv_append(num_tokens: int) -> Case:
    def arguments() -> Arguments:
        _, key, value = _projected(num_tokens)
        return key, value, *_caches_and_slots(num_tokens)

    return Case(
        _name("kv_append", num_tokens, 32768),
        f"{num_tokens} x 2 x {NUM_KV_HEADS} x {HEAD_DIM} bfloat16 of a fused projection",
        kv_append,
        _append,
        arguments,
        num_bytes=num_tokens * (ITEM_BYTES * HEAD_DIM * 4 * NUM_KV_HEADS + 8),
        is_large=num_tokens not in SMALL,
    )


def _rope_append(num_tokens: int) -> Case:
    def arguments() -> Arguments:
        return *_projected(num_tokens), *_turns(num_tokens), *_caches_and_slots(num_tokens)

    heads = 2 * NUM_HEADS + 4 * NUM_KV_HEADS + 2
    return Case(
        _name("rope_append", num_tokens, 32768),
        f"{num_tokens} x ({NUM_HEADS} + 2 x {NUM_KV_HEADS}) x {HEAD_DIM} bfloat16 of a fused "
        "projection",
        rope_append,
        _append_turned,
        arguments,
        num_bytes=num_tokens * (ITEM_BYTES * HEAD_DIM * heads + 8),
        rtol=ROUNDINGS,
        atol=ROUNDINGS,
        is_large=num_tokens not in SMALL,
    )


def _append_rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_slabs: torch.Tensor,
    value_slabs: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
) -> torch.Tensor:
    keys = rotated(turned(key, cos, sin)).to(DTYPE)
    for slabs, slots, tokens in ((key_slabs, key_slots, keys), (value_slabs, value_slots, value)):
        slabs.view(DTYPE).view(-1, *tokens.shape[1:])[slots] = tokens
    return rotated(turned(query, cos, sin)).to(DTYPE)


def _tiered_append(num_tokens: int) -> Case:
    def arguments() -> Arguments:
        caches_and_slots = [_caches_and_slots(num_tokens) for _ in "kv"]
        slabs = [
            cache.view(torch.uint8).view(len(cache), NUM_KV_HEADS, -1)
            for cache, _, _ in caches_and_slots
        ]
        slots = [each for _, _, each in caches_and_slots]
        return *_projected(num_tokens), *_turns(num_tokens), *slabs, *slots

    heads = 2 * NUM_HEADS + 4 * NUM_KV_HEADS + 2
    return Case(
        _name("tiered_append", num_tokens, 32768),
        f"{num_tokens} x ({NUM_HEADS} + 2 x {NUM_KV_HEADS}) x {HEAD_DIM} bfloat16 of a fused "
        "projection",
        tiered_append,
        _append_rotated,
        arguments,
        num_bytes=num_tokens * (ITEM_BYTES * HEAD_DIM * heads + 16),
        is_large=num_tokens not in SMALL,
    )
