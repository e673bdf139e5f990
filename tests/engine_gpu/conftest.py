"""These tests need a CUDA device, torch, triton, transformers, safetensors, numpy and pytest, and
nothing else of the suite:

python -m pytest -m gpu -c /dev/null --rootdir=. --confcutdir=tests/engine_gpu tests/engine_gpu

With FLASHRAY_TEST_DEVICE=cpu in the environment they rehearse on a CPU what can be had there.
"""

from pathlib import Path

import pytest
import torch

from tests.engine_gpu.engines import IS_REHEARSAL, save_small_llama


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def _needs_a_gpu() -> None:
    if not IS_REHEARSAL and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def folder(_needs_a_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-llama")
    save_small_llama(folder)
    return folder
