"""These tests need a CUDA device, torch, triton, numpy and pytest, and nothing else of the suite:

python -m kernels build
python -m tests.kernels.gpu.run
"""

from collections.abc import Iterator

import pytest
import torch

from kernels.kernel import Kernel
from tests.kernels.launches import form_of

# The forms of the models that are served.
BUNDLED_IN_PART = {
    "fp8_quantise",
    "kv_append",
    "kv_quantise_keys",
    "kv_quantise_values",
    "kv_restore_keys",
    "kv_restore_values",
    "linear_few_rows",
    "linear_one_row",
    "linear_silu_mul_few_rows",
    "linear_silu_mul_one_row",
    "linear_tiled",
    "paged_decode",
    "paged_decode_merge",
    "paged_prefill",
    "paged_prefill_merge",
    "paged_prefill_split",
    "rms_norm",
    "rms_norm_residual",
    "rope_append",
    "rotary",
    "silu_mul",
    "skip_list",
    "tiered_append",
    "tiered_decode",
    "tiered_decode_merge",
    "tiered_plan",
    "tiered_skip",
    "tiered_skip_again",
    "tiered_skip_merge",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _nothing_is_compiled(_needs_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch comes from the bundle, but for the forms that it leaves out."""
    launch = Kernel.launch

    def refuse(kernel, grid, arguments, meta) -> None:
        form = form_of(kernel.contract, arguments, meta)
        if kernel.name in BUNDLED_IN_PART and form not in kernel.variants:
            launch(kernel, grid, arguments, meta)
            return
        pytest.fail(
            f"{kernel.name} was about to be compiled just in time for {meta}: "
            "build the bundle (python -m kernels build), or declare the variant"
        )

    monkeypatch.setattr("kernels.kernel.Kernel.launch", refuse)


@pytest.fixture(autouse=True)
def _seeded(_needs_a_gpu: None) -> None:
    """The same numbers in whichever process, and after whichever test."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned(_needs_a_gpu: None) -> Iterator[None]:
    """What is allocated and never stored is NaN, or the greatest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _given_back(_needs_a_gpu: None) -> Iterator[None]:
    """Other processes test on the same GPU."""
    yield
    torch.cuda.empty_cache()
