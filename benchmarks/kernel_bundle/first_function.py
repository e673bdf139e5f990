"""A new process, up to functions that are ready to launch:
`python -m benchmarks.kernel_bundle.first_function STARTED_S bundle|all|triton`.

bundle: an op launches its kernel out of the bundle; all: besides, every variant that a GPU of
capability 9.0 would load; triton: the same one kernel out of Triton's own warm cache.
STARTED_S is the caller's `time.monotonic()`. The driver is a fake, for no GPU is needed: the import
of cuda.core and loading by the real driver come on top. Prints seconds, as JSON.
"""

import json
import sys
import time

import torch

CAPABILITY = 90


def main() -> None:
    imported_s = time.monotonic()
    started_s, way = float(sys.argv[1]), sys.argv[2]
    num_functions = from_triton() if way == "triton" else from_bundle(is_whole=way == "all")
    ready_s = time.monotonic()
    assert ("triton" in sys.modules) == (way == "triton")
    report = {
        "ready_s": ready_s - imported_s,
        "with_imports_s": ready_s - started_s,
        "num_functions": num_functions,
    }
    print(json.dumps(report))


def from_bundle(*, is_whole: bool) -> int:
    from kernels.bundle.bundle import Bundle
    from kernels.bundle.index import default_folder
    from kernels.bundle.launching import BundleWay
    from kernels.launch import launching
    from kernels.silu_mul.api import silu_mul
    from tests.fakes.kernel_driver import CPU, FakeDriver

    driver = FakeDriver(capabilities={CPU: CAPABILITY})
    bundle = Bundle.open(default_folder())
    with launching(BundleWay(bundle, driver)):
        silu_mul(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert len(driver.launches) == 1
    if is_whole:
        for kernel in bundle.index.sources:
            assert bundle.why_stale(kernel) is None
        for key in {entry.key for entry in bundle.index.entries}:
            entry = bundle.pick(key, CAPABILITY)
            assert entry is not None
            driver.load(entry, bundle.image(entry), CPU)
    return len(driver.loaded)


def from_triton() -> int:
    from kernels.bundle.compile import compile_variant
    from kernels.silu_mul.kernel import silu_mul_kernel

    compile_variant(silu_mul_kernel, silu_mul_kernel.variants[0], CAPABILITY)
    return 1


if __name__ == "__main__":
    main()
