"""Prompts with hot prefixes, and what an endless cache would know of them."""

import random
from collections.abc import Iterable

from engine.cache.formats import BLOCK_SIZE
from router.generation import GenerationRequest, SamplingSettings

NUM_REQUESTS = 900
NUM_PREFIXES = 48
MAX_TOKENS = 16
SEED = 20_260_601


def hot_prefixes() -> list[GenerationRequest]:
    """The n-th most popular of the prefixes is asked for 1/n as often as the first; they are 8 to
    16 blocks long, what follows is 20 to 60 tokens."""
    chosen = random.Random(SEED)
    prefixes = [_tokens(chosen, BLOCK_SIZE * chosen.randint(8, 16)) for _ in range(NUM_PREFIXES)]
    weights = [1 / (rank + 1) for rank in range(NUM_PREFIXES)]
    return [
        GenerationRequest(
            f"bench-{number}",
            "tiny",
            chosen.choices(prefixes, weights)[0] + _tokens(chosen, chosen.randint(20, 60)),
            SamplingSettings(max_tokens=MAX_TOKENS, temperature=0.0),
        )
        for number in range(NUM_REQUESTS)
    ]


def oracle_cached_tokens(requests: Iterable[GenerationRequest]) -> int:
    """Of one endless cache that knows every earlier prompt, also those not computed yet."""
    from deployments.replica_router import prefix_chain  # imports Ray, which LocalRay forbids

    seen: set[bytes] = set()
    num_blocks = 0
    for request in requests:
        chain = prefix_chain(request)
        num_blocks += sum(block in seen for block in chain)
        seen.update(chain)
    return num_blocks * BLOCK_SIZE


def _tokens(chosen: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(chosen.randrange(1, 256) for _ in range(num_tokens))
