"""The kernels of the language model: right, whatever the sizes and strides, and the same bits for a
row in any batch."""

from collections.abc import Callable

import pytest
import torch

from kernels.fp8_quantise import reference as fp8_quantise_reference
from kernels.fp8_quantise.api import fp8_quantise
from kernels.kv_append import reference as kv_append_reference
from kernels.kv_append.api import kv_append
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rms_norm.api import rms_norm
from kernels.rope_append import reference as rope_append_reference
from kernels.rope_append.api import rope_append
from kernels.rotary import reference as rotary_reference
from kernels.rotary.api import rotary
from kernels.silu_mul import reference as silu_mul_reference
from kernels.silu_mul.api import silu_mul
from tests.kernels.gpu.compare import assert_gpu_equals_reference
from tests.kernels.tolerances import DTYPES, ROUNDINGS

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turns(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 3 * normal(num_tokens, 1, head_dim, dtype=torch.float32, seed=5)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (7, 63),
        (1, 576),
        (33, 4096),
        (2, 5120),
        (3, 16384),
        (3, 5, 64),
        (65, 40, 128),
        (0, 8),
    ],
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    tolerances = {"rtol": ROUNDINGS[dtype], "atol": 1e-7}

    assert_gpu_equals_reference(
        rms_norm, rms_norm_reference.rms_norm, x, weight, 1e-5, **tolerances
    )
    residual = normal(*shape, dtype=torch.float32, seed=2)
    assert_gpu_equals_reference(
        rms_norm, rms_norm_reference.rms_norm, x, weight, 1e-5, residual, **tolerances
    )


def test_rms_norm_of_heads_within_a_fused_projection(dtype: torch.dtype) -> None:
    key = normal(5, 12, 128, dtype=dtype)[:, 8:10]

    assert_gpu_equals_reference(
        rms_norm,
        rms_norm_reference.rms_norm,
        key,
        normal(128, dtype=dtype, seed=1),
        1e-5,
        rtol=ROUNDINGS[dtype],
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (3, 5, 6), (65, 40, 128), (2, 17, 64), (2, 1, 254), (0, 3, 64)]
)
def test_rotary(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = normal(shape[0], shape[1] + 2, shape[2], dtype=dtype)[:, : shape[1]]
    tolerance = ROUNDINGS[dtype] if dtype == torch.float32 else 0.0

    assert_gpu_equals_reference(
        rotary,
        rotary_reference.rotary,
        x,
        *turns(shape[0], shape[2], dtype),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (3, 2, 6), (65, 8, 128), (5, 3, 64), (1, 5, 254), (0, 2, 64)]
)
def test_kv_append(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_heads, head_dim = shape
    fused = normal(num_tokens, 3 * num_heads, head_dim, dtype=dtype)
    key = fused[:, :num_heads]
    value = normal(num_tokens, num_heads, head_dim, dtype=dtype, seed=1)
    caches = [normal(9, 8, num_heads, head_dim, dtype=dtype, seed=seed) for seed in (2, 3)]
    slots = torch.randperm(72, generator=torch.Generator().manual_seed(4))[:num_tokens]
    slots[1::3] = -1

    assert_gpu_equals_reference(
        kv_append, kv_append_reference.kv_append, key, value, *caches, slots
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 1, 2), (3, 5, 2, 6), (65, 32, 8, 128), (2, 9, 3, 64), (1, 17, 9, 254), (0, 3, 1, 64)],
)
def test_rope_append(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    width = head_dim + -head_dim % 8  # heads start at 16 bytes
    fused = normal(num_tokens, num_heads + 2 * num_kv_heads, width, dtype=dtype)[..., :head_dim]
    caches = [normal(9, 8, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (2, 3)]
    slots = torch.randperm(72, generator=torch.Generator().manual_seed(4))[:num_tokens]
    slots[1::3] = -1
    tolerance = ROUNDINGS[dtype] if dtype == torch.float32 else 0.0

    assert_gpu_equals_reference(
        rope_append,
        rope_append_reference.rope_append,
        *fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1),
        *turns(num_tokens, head_dim, dtype),
        *caches,
        slots,
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 63), (33, 14336), (2, 1025), (0, 8)])
def test_silu_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * normal(num_tokens, 2 * size + 8, dtype=dtype)[:, : 2 * size]

    assert_gpu_equals_reference(
        silu_mul, silu_mul_reference.silu_mul, gate_up, rtol=ROUNDINGS[dtype], atol=1e-7
    )


@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 1), (7, 63), (33, 4096), (2, 14336), (300, 16), (1, 28672), (0, 8)]
)
def test_fp8_quantise(num_rows: int, size: int, dtype: torch.dtype) -> None:
    powers = torch.logspace(-6, 3, max(num_rows, 1))[:num_rows, None]
    x = (normal(num_rows, size + 24, dtype=dtype) * powers).to(dtype)[:, :size]
    x[num_rows // 2 : num_rows // 2 + 1] = 0.0
    x[num_rows - 1 : num_rows, size // 2] = float("nan") if num_rows > 2 else 3.0

    assert_gpu_equals_reference(fp8_quantise, fp8_quantise_reference.fp8_quantise, x)


def rms_norm_of_hidden(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.new_ones(x.shape[-1]), 1e-5)


def rms_norm_of_heads(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.unflatten(1, (-1, 128)), x.new_ones(128), 1e-5).flatten(1)


def rms_norm_with_residual(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.new_ones(x.shape[-1]), 1e-5, x.float() + 1)


def rotary_by_one_angle(x: torch.Tensor) -> torch.Tensor:
    cos, sin = x.new_full((len(x), 1, 128), 0.6), x.new_full((len(x), 1, 128), 0.8)
    return rotary(x.unflatten(1, (-1, 128)), cos, sin).flatten(1)


def kv_append_of_heads(x: torch.Tensor) -> torch.Tensor:
    key = x.unflatten(1, (-1, 128))
    caches = x.new_zeros(2, len(x), 1, *key.shape[1:])
    kv_append(key, key, *caches, torch.arange(len(x), device=x.device))
    return torch.cat((*caches,), dim=-1).flatten(1)


def rope_append_by_one_angle(x: torch.Tensor) -> torch.Tensor:
    query, key, value = x.unflatten(1, (-1, 128)).split((4, 2, 2), dim=1)
    caches = x.new_zeros(2, len(x), 1, 2, 128)
    cos, sin = x.new_full((len(x), 1, 128), 0.6), x.new_full((len(x), 1, 128), 0.8)
    slots = torch.arange(len(x), device=x.device)
    turned = rope_append(query, key, value, cos, sin, *caches, slots)
    return torch.cat((turned, *caches.flatten(1, 2)), dim=1).flatten(1)


def fp8_quantise_bytes(x: torch.Tensor) -> torch.Tensor:
    quantised, scales = fp8_quantise(x)
    return torch.cat((quantised.float(), scales[:, None]), dim=1)


@pytest.mark.parametrize(
    "op",
    [
        rms_norm_of_hidden,
        rms_norm_of_heads,
        rms_norm_with_residual,
        rotary_by_one_angle,
        kv_append_of_heads,
        rope_append_by_one_angle,
        silu_mul,
        fp8_quantise_bytes,
    ],
)
def test_a_row_has_the_same_bits_in_any_batch(
    op: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = normal(300, 1024, dtype=dtype).cuda()
    together = op(x)

    for start, count in [(0, 1), (4, 1), (299, 1), (0, 2), (3, 16), (16, 33), (1, 299)]:
        rows = slice(start, start + count)
        assert torch.equal(op(x[rows]), together[rows])
