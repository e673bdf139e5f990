"""Keys, values and queries of which a certificate may be wrong."""

from collections.abc import Iterator

import torch

from benchmarks.kv_certificate.checks import Exact, Launch
from benchmarks.kv_certificate.stored import Stored, store, tiers_of
from kernels.kv_quantise.layout import BLOCK_TOKENS
from kernels.skip_list.api import skip_list
from kernels.tiered_plan.reference import Formats

INT4, K8V4 = Formats(4, 4), Formats(8, 4)
LENGTH, WARM = 2021, 128
NUM_HEADS, NUM_KV_HEADS = 32, 8
EPSILONS = (0.03, 0.3, 0.9)
KEYS = ("normal", "far from zero", "large channels", "tiny scales", "a loud token a block")
SHARPNESSES = (1.0, 3.0, 8.0)


def hostile_launches(
    num_queries: int, rounds: int, device: str, size: int = 128
) -> Iterator[Launch]:
    """Of every kind of keys, in both formats: queries that are random, or aim at a token that is to
    be skipped; skips that are random, of the last step's choice, or all but the heaviest."""
    generator = torch.Generator(device).manual_seed(1)
    for nth in range(rounds):
        for kind in KEYS:
            for formats in (K8V4, INT4):
                stored = _stored(kind, formats, size, generator, device)
                exact = Exact.of(stored)
                for sharpness in SHARPNESSES:
                    query = _queries(exact, num_queries, sharpness, generator)
                    for skips in _choices(stored, exact, query, generator):
                        epsilon = EPSILONS[nth % len(EPSILONS)]
                        scale = sharpness * size**-0.5
                        words = f"{kind}, {formats}, sharpness {sharpness:g}"
                        yield Launch(stored, exact, query, skips, epsilon, scale, words=words)


def _stored(
    kind: str, formats: Formats, size: int, generator: torch.Generator, device: str
) -> Stored:
    shape = 1, NUM_KV_HEADS, LENGTH, size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    keys, values = normal(*shape), normal(*shape)
    if kind == "far from zero":
        keys = keys + 20 * normal(1, NUM_KV_HEADS, 1, size)
    elif kind == "large channels":
        keys[..., ::17] *= 30
    elif kind == "tiny scales":
        keys *= torch.exp2(-12 * torch.rand(size, generator=generator, device=device))
    elif kind == "a loud token a block":
        keys[:, :, 5::BLOCK_TOKENS] *= 12
    # Cold values lean to one side, where a result without them cannot be.
    values[:, :, 64:-300] += 3
    return store(keys.bfloat16(), values.bfloat16(), tiers_of(LENGTH, WARM), formats)


def _queries(
    exact: Exact, num_queries: int, sharpness: float, generator: torch.Generator
) -> torch.Tensor:
    """Half of them near a cold key each."""
    num_kv_heads, _, size = exact.keys.shape
    device, group = exact.keys.device, NUM_HEADS // num_kv_heads
    shape = num_queries, num_kv_heads, group, size
    query = torch.randn(shape, generator=generator, device=device)
    places = torch.randint(
        64, LENGTH - 400, (num_queries // 2, num_kv_heads), generator=generator, device=device
    )
    near = exact.keys[torch.arange(num_kv_heads, device=device), places].float()
    near = near / near.norm(dim=-1, keepdim=True) * size**0.5
    aim = torch.rand(len(near), 1, group, 1, generator=generator, device=device)
    query[: len(near)] = aim * near[:, :, None] + (1 - aim) * query[: len(near)]
    return query.view(num_queries, NUM_HEADS, size).bfloat16()


def _choices(
    stored: Stored, exact: Exact, query: torch.Tensor, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """skips [num_queries, num_kv_heads, blocks]."""
    num, num_kv_heads, size = len(query), len(exact.keys), query.shape[2]
    device, num_cold = query.device, stored.num_cold
    shape = num, num_kv_heads, num_cold
    share = torch.rand(num, 1, 1, generator=generator, device=device)
    yield (torch.rand(shape, generator=generator, device=device) < 0.3 + 0.7 * share).int()
    # Masses of queries a little off: what the step before may have seen.
    noise = torch.randn(query.shape, generator=generator, device=device)
    before = (query.float() + 0.3 * noise).double().view(num, num_kv_heads, -1, size)
    cold = exact.keys[:, stored.bounds[0] : stored.bounds[1]]
    scores = torch.einsum("qkgd,ktd->qkgt", before, cold) * size**-0.5
    masses = scores.unflatten(-1, (num_cold, BLOCK_TOKENS)).logsumexp(-1)
    lse = masses.logsumexp(-1).flatten(1).float()
    masses = (masses.transpose(2, 3) / 0.6931471805599453).float().contiguous()
    bounds = torch.tensor(stored.bounds, dtype=torch.int32, device=device)[None]
    for budget in (0.01, 0.3):
        yield skip_list(masses, lse, bounds, stored.formats, budget)
    heaviest = masses.amax(-1).argmax(-1, keepdim=True)
    yield torch.ones(shape, dtype=torch.int32, device=device).scatter_(2, heaviest, 0)
