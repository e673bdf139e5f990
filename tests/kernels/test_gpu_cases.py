"""The GPU tests' small cases: no kernel is left out, and the bundle has code for every launch but
some of the tiers, of which it has the default's and those of heads of 128, and of windows over
split contexts."""

from kernels.registry import all_kernels
from tests.kernels.gpu import conftest
from tests.kernels.gpu.cases import launches_by_kernel, small_calls
from tests.kernels.launches import launches_of

BUNDLED_IN_PART = {
    "kv_quantise_keys",
    "kv_quantise_values",
    "kv_restore_keys",
    "kv_restore_values",
    "paged_prefill_split",
    "skip_list",
    "tiered_decode",
    "tiered_decode_merge",
    "tiered_plan",
    "tiered_skip",
    "tiered_skip_again",
    "tiered_skip_merge",
}


def test_every_kernel_has_a_small_case_with_a_variant() -> None:
    calls = small_calls("cpu")

    assert launches_by_kernel(calls).keys() == all_kernels().keys()
    launches = [launch for call in calls.values() for launch in launches_of(call)]
    without = {at.contract.kernel for at, form in launches if form not in at.kernel().variants}
    bundled = {at.contract.kernel for at, form in launches if form in at.kernel().variants}
    assert without == BUNDLED_IN_PART
    assert without <= conftest.BUNDLED_IN_PART, "their tests would refuse to compile them"
    assert bundled == all_kernels().keys()
