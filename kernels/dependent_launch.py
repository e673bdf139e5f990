"""Programmatic dependent launch, sm_90 and up: the programs of a kernel start while the kernel
before it on the stream still runs, and wait for what it stores.

A kernel that calls `wait_for_earlier_kernels` is launched so; on earlier GPUs both functions do
nothing. Every program waits, or what is launched later could read too early, and only then lets the
next kernel start. So what it loads before it waits may be stored by any kernel but the one before.
(CUDA C++ Programming Guide, Programmatic Dependent Launch and Synchronization)
"""

import triton
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.interpreted import IS_INTERPRETED

FIRST_ARCH = 90


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
