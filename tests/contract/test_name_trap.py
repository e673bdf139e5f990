"""`kernels` is also the name of a Hugging Face distribution that transformers probes for."""

import importlib.metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kernels_is_ours():
    import kernels

    assert Path(kernels.__file__).is_relative_to(ROOT)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_kernels_package_is_a_docstring():
    import ast

    (only,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(only, ast.Expr)


def test_our_version_is_outside_the_probed_range():
    major, minor, patch = map(int, importlib.metadata.version("flashray").split(".")[:3])
    assert not (0, 18, 2) <= (major, minor, patch) < (0, 19, 0)


def test_transformers_does_not_take_ours_for_theirs():
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()
