"""What an import drags in. A linter sees imports that are written; this sees those that happen."""

import subprocess
import sys

import pytest

HEAVY = {"ray", "torch", "transformers", "triton"}


def imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_the_router_needs_no_torch_no_ray_no_transformers():
    assert imported_by("import router.app") & HEAVY == set()


@pytest.mark.parametrize("module", ["engine.engine", "engine.async_engine", "engine.config"])
def test_planning_needs_no_torch(module: str):
    assert imported_by(f"import {module}") & HEAVY == set()


def test_the_shell_needs_no_torch():
    assert imported_by("import deployments.engine_shell") & {"torch", "transformers"} == set()


def test_the_ingress_needs_no_torch():
    assert imported_by("import deployments.router_ingress") & {"torch", "transformers"} == set()
