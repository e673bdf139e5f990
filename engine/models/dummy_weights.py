"""Weights of the right shapes and no meaning: to measure speed without a checkpoint."""

import zlib

import torch

from engine.models.shard import Span

SPREAD = 0.02  # as models are initialised: activations stay finite through any number of layers


class DummyCheckpoint:
    """Reads as `Checkpoint` does, and has every tensor that is asked for: ones for a norm, else
    normal numbers that depend on the name alone."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._dtype = dtype
        self._device = device

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def read(self, name: str, *spans: Span) -> torch.Tensor:
        destination = self.allocate(tuple(span.size for span in spans))
        self.read_into(name, destination, *spans)
        return destination

    def read_into(self, name: str, destination: torch.Tensor, *spans: Span) -> None:
        held = destination.zero_()[tuple(slice(span.num_held) for span in spans)]
        if name.endswith("norm.weight"):
            held.fill_(1.0)
            return
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        held.normal_(0.0, SPREAD, generator=generator)

    def ignore(self, name: str) -> None:
        """There is nothing that nobody asks for."""
