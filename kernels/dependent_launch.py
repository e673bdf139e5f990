"""Programmatic dependent launch, sm_90 and up: the programs of a kernel start while the kernel
before it on the stream still runs, and wait for what it stores.

A kernel that calls `wait_for_earlier_kernels` is launched so from a bundle; elsewhere, and on
earlier GPUs, both functions do nothing. Before the wait it may touch what no kernel of its stream
stores. (CUDA C++ Programming Guide, Programmatic Dependent Launch and Synchronization)
"""

import triton
import triton.language as tl
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_ARCH = 90
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@core.builtin
def has_dependent_launch(_semantic=None):
    """Whether the GPU that is compiled for has it; Triton's own `target_info` asks for that of this
    host."""
    arch = _semantic.builder.options.arch  # "sm90"
    return core.constexpr(int(arch.removeprefix("sm")) >= FIRST_ARCH)


@triton.jit
def let_next_kernel_start():
    """Once all programs of this kernel have called it, or ended: it takes what room they leave."""
    if not IS_INTERPRETED and has_dependent_launch():
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier_kernels():
    """Until they have ended, and what they stored is seen."""
    if not IS_INTERPRETED and has_dependent_launch():
        gdc_wait()
