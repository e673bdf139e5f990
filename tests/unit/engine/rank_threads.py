"""Ranks as threads of the test: one gloo group, each rank on its own thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from engine.ranks.group import RankOptions, TorchRanks, join_ranks

Result = TypeVar("Result")
TIMEOUT_S = 20.0


def run_ranks(size: int, work: Callable[[TorchRanks], Result]) -> list[Result]:
    """What `work` returned on every rank, in order. The first error of any rank, if there is one;
    the others are told."""
    store = dist.HashStore()
    all_joined = threading.Barrier(size)

    def run(rank: int) -> Result:
        ranks = join_ranks(RankOptions(rank, size, timeout_s=TIMEOUT_S), store)
        all_joined.wait(TIMEOUT_S)
        return work(ranks)

    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(run, rank) for rank in range(size)]
        return [result.result(2 * TIMEOUT_S) for result in results]
