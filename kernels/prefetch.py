"""What is read soon is brought into the L2: of memory that any kernel may store meanwhile, too, for
what it stores goes there as well."""

import triton
import triton.language as tl

from kernels.interpreted import IS_INTERPRETED

LINE_BYTES = tl.constexpr(128)


@triton.jit
def prefetch_lines(lines):
    """Of 128 bytes, which these pointers lie in."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [lines],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
