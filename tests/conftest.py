"""Fixtures that every part of the suite shares."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Without a GPU kernels run in Triton's interpreter, which Triton decides on when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

from cluster.bringup import RAY_ENVIRONMENT
from tests.fakes.valkey import valkey, valkey_server  # noqa: F401

settings.register_profile("any machine", deadline=None)  # a busy one is slow, not wrong
settings.load_profile("any machine")

os.environ["FLASHRAY_STATE"] = tempfile.mkdtemp(prefix="flashray-test-state-")
os.environ.update(RAY_ENVIRONMENT)  # Ray reads its environment when it is imported


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The converted SmolLM2-135M-Instruct: real weights in float32."""
    from deployments.model_files import BUILT_IN_MODEL, prepare_model

    return prepare_model(BUILT_IN_MODEL).path
