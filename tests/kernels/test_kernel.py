"""What the code of a kernel depends on."""

from kernels.registry import all_kernels


def test_just_in_time_no_code_is_chosen_by_what_no_address_is_a_multiple_of() -> None:
    kernels = all_kernels()
    of = {name: kernels[name].jit.kwargs["do_not_specialize"] for name in kernels}

    assert of["linear_few_rows"] == ["rows"]
    assert of["rope_append"] == ["blocks", "block_size", "heads", "kv_heads"]
    assert {"scale", "window", "splits"} < set(of["paged_decode"])
