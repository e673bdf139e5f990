"""What each layer's attention loses by each cold format, measured on real tokens.

Every layer attends exactly, and that is what the next one gets, so that the errors of layers do not
mix. Beside it the same queries see keys and values as a tiered cache holds them behind a prompt.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.cache.formats import BLOCK_SIZE, COLD_FORMATS, BlockFormat, Format, Part
from engine.cache.tier_config import TierConfig
from engine.errors import EngineError, UnsupportedModel
from engine.models.decoder import Decoder
from engine.models.rotation import refuse_unrotatable
from kernels.kv_quantise.reference import (
    Packed,
    dequantised_keys,
    dequantised_values,
    quantised_keys,
    quantised_values,
)
from kernels.linear.api import PackedLinear, linear
from kernels.paged_attention.api import causal_mask
from kernels.rotary.api import rotary
from kernels.tiered_append.hadamard import rotated

LEAST_HEAD_DIM = 32  # that a slab can be laid out for
BITS = {Format.INT8: 8, Format.INT4: 4}

Quantised = Callable[[torch.Tensor, int], Packed]
Dequantised = Callable[[Packed, int], torch.Tensor]


def min_tokens(tiers: TierConfig) -> int:
    """Of a window with a whole cell of tokens that see a cold block."""
    least = tiers.sink_tokens + BLOCK_SIZE + tiers.warm_tokens + tiers.hot_tokens
    return -(-least // tiers.cell_tokens) * tiers.cell_tokens + tiers.cell_tokens


@torch.inference_mode()
def measure_errors(
    decoder: Decoder,
    windows: Sequence[Sequence[int]],
    tiers: TierConfig,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, tuple[float, ...]]:
    """Of each cold format, every layer's error: |tiered - exact| / |exact|, Frobenius norms of what
    attention adds to the residual (behind the output projection), over all tokens that see cold
    blocks by `tiers.prefill_ages`; 0 where a sliding window lets none see any.

    `windows`: token ids, at least `min_tokens(tiers)` each, read apart from each other. `progress`
    is called after each layer of each window. Raises UnsupportedModel, and EngineError for numbers
    that are not finite.
    """
    refuse_head_dim(decoder.config.head_dim)
    meter = _ErrorMeter(decoder, tiers, progress)
    for window in windows:
        assert len(window) >= min_tokens(tiers), len(window)
        token_ids = torch.tensor(window, device=decoder.weights.device)
        positions = torch.arange(len(window), device=token_ids.device)
        decoder.forward(token_ids, positions, meter.attend, rows=positions[-1:])
    return meter.errors()


def refuse_head_dim(head_dim: int) -> None:
    """Raises UnsupportedModel for heads that a tiered cache cannot hold."""
    refuse_unrotatable(head_dim)
    if head_dim < LEAST_HEAD_DIM:
        raise UnsupportedModel(
            f"a tiered cache needs a head_dim of at least {LEAST_HEAD_DIM}, this model's is "
            f"{head_dim}; choose exact"
        )


class _ErrorMeter:
    """Sums squares over windows: of the whole, and of what each format loses of it."""

    def __init__(self, decoder: Decoder, tiers: TierConfig, progress: Callable[[], None]) -> None:
        self._decoder = decoder
        self._tiers = tiers
        self._progress = progress
        num_layers = decoder.config.num_layers
        self._whole = [0.0] * num_layers
        self._lost = {name: [0.0] * num_layers for name in COLD_FORMATS}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """As `engine.models.decoder.Attend`, of a window from its first token on, a cell of the
        prefill rule at a time."""
        query, key = rotary(query, cos, sin), rotary(key, cos, sin)
        keys, values = key.transpose(0, 1), value.transpose(0, 1)  # [kv head, token, head_dim]
        num_tokens, window = len(query), self._decoder.config.sliding_windows[layer]
        num_cold = self._tiers.prefill_ages(num_tokens - 1).warm_start * BLOCK_SIZE
        stored = (
            _stored(rotated(keys), num_cold, quantised_keys, dequantised_keys),
            _stored(rotated(values), num_cold, quantised_values, dequantised_values),
        )
        cells = []
        for start in range(0, num_tokens, self._tiers.cell_tokens):
            end = min(start + self._tiers.cell_tokens, num_tokens)
            context_lens = torch.tensor([end], device=query.device)
            mask = causal_mask(context_lens, end - start, end, window, query.dtype)[0]
            exact = _attended(query[start:end], keys[:, :end], values[:, :end], mask)
            cells.append(exact)
            num = _num_seeing_cold(self._tiers, start, end, window)
            if num:
                rotated_query = rotated(query[start : start + num])
                self._compare(layer, start, rotated_query, stored, mask[:num], exact[:num])
        self._progress()
        return torch.cat(cells)

    def _compare(
        self,
        layer: int,
        start: int,
        query: torch.Tensor,
        stored: Sequence[Mapping[Format, torch.Tensor]],
        mask: torch.Tensor,
        exact: torch.Tensor,
    ) -> None:
        """query, rotated, and exact [num_tokens, num_heads, head_dim] are of the first tokens of
        the cell at `start`, mask [num_tokens, num_keys]."""
        num_keys, ages = mask.shape[1], self._tiers.prefill_ages(start)
        num_blocks = -(-num_keys // BLOCK_SIZE)
        self._whole[layer] += self._squares(layer, exact)
        for name in COLD_FORMATS:
            runs = list(replace(self._tiers, cold_format=name).runs(ages, num_blocks))
            keys, values = (_seen(stored[part], part, runs)[:, :num_keys] for part in Part)
            tiered = rotated(_attended(query, keys, values, mask))
            self._lost[name][layer] += self._squares(layer, tiered - exact)

    def _squares(self, layer: int, attended: torch.Tensor) -> float:
        output = self._decoder.weights.layers[layer].output
        assert isinstance(output, PackedLinear), type(output)
        return linear(attended.flatten(1), output).double().square().sum().item()

    def errors(self) -> dict[str, tuple[float, ...]]:
        """Raises EngineError."""
        return {
            name: tuple(map(_relative, range(len(lost)), lost, self._whole))
            for name, lost in self._lost.items()
        }


def _relative(layer: int, lost: float, whole: float) -> float:
    error = math.sqrt(lost / whole) if whole else 0.0
    if not math.isfinite(error):
        raise EngineError(
            f"layer {layer}: what attention gives is not finite on this text; "
            "verify the model's files: flashray doctor"
        )
    return error


def _num_seeing_cold(tiers: TierConfig, start: int, end: int, window: int | None) -> int:
    """Of the tokens [start, end) of a cell: the first ones, as far as a window reaches back."""
    ages = tiers.prefill_ages(start)
    if ages.warm_start == ages.cold_start:
        return 0
    if window is None:
        return end - start
    last_seeing = ages.warm_start * BLOCK_SIZE + window - 2
    return min(max(last_seeing + 1 - start, 0), end - start)


def _stored(
    heads: torch.Tensor, num_cold: int, quantised: Quantised, dequantised: Dequantised
) -> dict[Format, torch.Tensor]:
    """heads [num_kv_heads, num_tokens, head_dim], rotated -> what is read back of each format: of
    bfloat16 all tokens, of the others the first `num_cold`, rounded from bfloat16."""
    hot = heads.bfloat16()
    blocks = hot[:, :num_cold].unflatten(1, (-1, BLOCK_SIZE))
    cold = {
        name: dequantised(quantised(blocks, bits), bits).flatten(1, 2).to(heads.dtype)
        for name, bits in BITS.items()
    }
    return {Format.BF16: hot.to(heads.dtype), **cold}


def _seen(
    stored: Mapping[Format, torch.Tensor], part: Part, runs: Iterable[tuple[int, int, BlockFormat]]
) -> torch.Tensor:
    """[num_kv_heads, tokens of the runs, head_dim]."""
    return torch.cat(
        [
            stored[run_format[part]][:, start * BLOCK_SIZE : end * BLOCK_SIZE]
            for start, end, run_format in runs
        ],
        1,
    )


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """query [num_tokens, num_heads, head_dim], keys, values [num_kv_heads, num_keys, head_dim],
    mask [num_tokens, num_keys] -> like query. The keys of a KV head are shared, not copied."""
    grouped = query.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    keys, values = (each[:, None].expand(-1, grouped.shape[1], -1, -1) for each in (keys, values))
    attended = F.scaled_dot_product_attention(grouped, keys, values, mask[None, None])
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
