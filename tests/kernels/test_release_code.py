from pathlib import Path

from tests.kernels.compiling import output_of

KERNELS = ["silu_mul", "rms_norm_residual", "rope_append"]


def test_the_decorator_leaves_the_release_code_as_it_is(tmp_path: Path):
    printed = output_of(
        "tests.kernels.release_code",
        str(tmp_path),
        *KERNELS,
        cache=tmp_path / "cache",
        TRITON_ALWAYS_COMPILE="1",
        TRITON_DISABLE_LINE_INFO="1",  # the two lie in different files
    )
    assert printed == ""
