"""Which statement of a kernel runs now."""

import linecache
import sys
from pathlib import Path

import numpy as np
import triton

ROOT = Path(__file__).parents[2]
# Between a kernel and what it calls lie Triton's language and this package.
_BETWEEN = tuple(str(Path(file).parent) + "/" for file in (__file__, triton.__file__, np.__file__))


def statement() -> str:
    """`file:line: text` of the innermost frame of a kernel, or of a function it calls."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    file, line = Path(frame.f_code.co_filename), frame.f_lineno
    shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    return f"{shown}:{line}: {linecache.getline(str(file), line).strip()}"
