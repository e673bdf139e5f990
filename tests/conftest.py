"""Fixtures that every part of the suite shares."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The converted SmolLM2-135M-Instruct: real weights in float32."""
    from deployments.model_files import BUILT_IN_MODEL, prepare_model

    return prepare_model(BUILT_IN_MODEL).path
