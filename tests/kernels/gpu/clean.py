"""For the sanitizers: every kernel once, at small sizes. Prints how many ran."""

import torch

from kernels.registry import all_kernels
from tests.kernels.gpu.cases import launches_by_kernel, small_calls

if __name__ == "__main__":
    calls = small_calls()
    missed = all_kernels().keys() - launches_by_kernel(calls).keys()
    if missed:
        raise SystemExit(f"no case in cases.py launches {' '.join(sorted(missed))}")
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    print(f"ran {len(all_kernels())} kernels in {len(calls)} calls")
