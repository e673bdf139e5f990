"""Rotary frequencies: the default ones, and linear, llama3 and yarn, which stretch the context."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Fields a `rope_type` does not use keep their defaults.

    `factor` stretches the context; `original_context_len` is the one before stretching.
    `attention_factor` None derives yarn's from `factor` (and `mscale`, `mscale_all_dim`).
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """`inverse_frequencies` [head_dim / 2] float32; cosines and sines are scaled by `scaling`."""

    inverse_frequencies: torch.Tensor
    scaling: float

    def cos_sin(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] -> two of [num_tokens, 1, head_dim], halves repeated."""
        angles = positions[:, None].float() * self.inverse_frequencies
        turned = torch.cat((angles, angles), dim=-1)[:, None]
        return (turned.cos() * self.scaling).to(dtype), (turned.sin() * self.scaling).to(dtype)


def build_rope(parameters: RopeParameters, head_dim: int) -> Rope:
    return ROPE_TYPES[parameters.rope_type](parameters, head_dim)


def _plain_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _default(parameters: RopeParameters, head_dim: int) -> Rope:
    return Rope(_plain_frequencies(parameters.theta, head_dim), 1.0)


def _linear(parameters: RopeParameters, head_dim: int) -> Rope:
    return Rope(_plain_frequencies(parameters.theta, head_dim) / parameters.factor, 1.0)


def _llama3(parameters: RopeParameters, head_dim: int) -> Rope:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    plain = _plain_frequencies(parameters.theta, head_dim)
    turns = parameters.original_context_len * plain / (2 * math.pi)  # over the original context
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return Rope((1 - kept) * plain / parameters.factor + kept * plain, 1.0)


def _yarn(parameters: RopeParameters, head_dim: int) -> Rope:
    """https://arxiv.org/abs/2309.00071, section 3.2: a ramp over dimensions, and a temperature."""
    plain = _plain_frequencies(parameters.theta, head_dim)
    low, high = _yarn_ramp(parameters, head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    stretched = plain / parameters.factor
    return Rope(stretched * ramp + plain * (1 - ramp), _yarn_scaling(parameters))


def _yarn_ramp(parameters: RopeParameters, head_dim: int) -> tuple[float, float]:
    def dimension_of(num_turns: float) -> float:
        wave = parameters.original_context_len / (num_turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(parameters.theta))

    low, high = dimension_of(parameters.beta_fast), dimension_of(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return (low, high) if low != high else (low, high + 0.001)  # a step, not a division by zero


def _yarn_scaling(parameters: RopeParameters) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if parameters.factor <= 1 else 0.1 * mscale * math.log(parameters.factor) + 1.0

    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.mscale and parameters.mscale_all_dim:
        return temperature(parameters.mscale) / temperature(parameters.mscale_all_dim)
    return temperature(1.0)


ROPE_TYPES: dict[str, Callable[[RopeParameters, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
