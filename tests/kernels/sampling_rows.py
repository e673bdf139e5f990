"""Rows of logits with their own sampling parameters, for the tests on a CPU and on a GPU."""

from dataclasses import dataclass, replace

import torch

from kernels.sampling.uniform import int64_of


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Row(temperature=0.0)
# Each filter alone, at its ends, and with the others.
ROWS = (
    GREEDY,
    Row(),
    Row(temperature=0.3),
    Row(temperature=5.0),
    Row(temperature=1e-7),
    Row(min_p=0.05),
    Row(min_p=1.0),
    Row(top_k=1),
    Row(top_k=3),
    Row(top_k=50),
    Row(top_k=2**32 + 1),
    Row(top_p=0.0),
    Row(top_p=0.3),
    Row(top_p=0.9),
    Row(top_p=1 - 2**-24),
    Row(top_k=40, top_p=0.6),
    Row(temperature=0.7, min_p=0.02, top_k=20, top_p=0.95),
    Row(temperature=1.5, min_p=0.3, top_k=1000, top_p=0.5),
    replace(GREEDY, min_p=0.5, top_k=3, top_p=0.5),
)


def parameters_of(
    *rows: Row, seed: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """floats, numbers, positions: as the entry takes them."""
    floats = torch.tensor([(row.temperature, row.min_p, row.top_p) for row in rows])
    seeds = int64_of(2**64 - 5 + seed + index for index in range(len(rows)))
    top_ks = torch.tensor([row.top_k for row in rows], dtype=torch.int64)
    numbers = torch.stack((top_ks, seeds), dim=1)
    positions = 7 * torch.arange(len(rows))
    return floats.view(-1, 3).to(device), numbers.to(device), positions.to(device)


def normal(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def mask_of(allowed: torch.Tensor, *, beyond: bool = True) -> torch.Tensor:
    """allowed [rows, vocab] bool -> [rows, words] int32; `beyond`: the bits past the vocabulary."""
    rows, vocab = allowed.shape
    whole = torch.full((rows, -(-vocab // 32) * 32), beyond)
    whole[:, :vocab] = allowed
    bits = whole.view(rows, -1, 32).long() << torch.arange(32)
    return bits.sum(-1).to(torch.int32)
