"""The GPU tests' small cases: no kernel is left out, and the bundle has code for every launch."""

from kernels.registry import all_kernels
from tests.kernels.gpu.cases import launches_by_kernel, small_calls
from tests.kernels.launches import assert_bundled


def test_every_kernel_has_a_small_case_with_a_variant() -> None:
    calls = small_calls("cpu")

    assert launches_by_kernel(calls).keys() == all_kernels().keys()
    for call in calls.values():
        assert_bundled(call)
