"""Whether kernels of this process are interpreted: then code of a GPU has to be left out."""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
