"""The GPU tests' small cases: no kernel is left out, and the bundle has code for one of each."""

from kernels.registry import all_kernels
from tests.kernels.gpu.cases import launches_by_kernel, small_calls
from tests.kernels.launches import launches_of


def test_every_kernel_has_a_small_case_with_a_variant() -> None:
    calls = small_calls("cpu")

    assert launches_by_kernel(calls).keys() == all_kernels().keys()
    launches = [launch for call in calls.values() for launch in launches_of(call)]
    bundled = {
        launcher.contract.kernel
        for launcher, form in launches
        if form in launcher.kernel().variants
    }
    assert bundled == all_kernels().keys()
