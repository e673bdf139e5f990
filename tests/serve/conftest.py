"""One real Ray, Serve, engine and router for the tests of this folder; a tiny random model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.bringup import free_port
from deployments.config import (
    AppConfig,
    AuditSettings,
    EngineSettings,
    HttpSettings,
    LimitSettings,
    RouterSettings,
)
from deployments.local_backend import LocalBackend
from deployments.local_cluster import RunningApp, local_app
from router.identity import hash_key
from tests.fakes.checkpoint import tiny_checkpoint

KEY = "sk-serve-test"


@pytest.fixture(scope="package")
def audit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="package")
def app(audit_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    tiny_checkpoint(folder, torch.float32, max_position_embeddings=4096)
    config = AppConfig(
        model=str(folder),
        key_hashes={hash_key(KEY): "red"},
        engine=EngineSettings(kv_cache_gib=0.02, lease_s=2.0, max_num_batched_tokens=128),
        router=RouterSettings(num_replicas=2),
        limits=LimitSettings(lease_s=30, timeout_s=5),  # no share is ever taken
        audit=AuditSettings(folder=audit_folder),
        http=HttpSettings(port=free_port()),
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("FLASHRAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FLASHRAY_STATE", str(tmp_path_factory.mktemp("state")))
        running = stack.enter_context(
            local_app(config, print, include_dashboard=False, num_cpus=12, num_gpus=4)
        )
        yield running


def engine_handle(app_name: str) -> Any:
    """A new one, for one test: a handle hears of new replicas through the event loop it was first
    used in, and is deaf for ever once news came while that loop rested, as it does between tests.
    `serve.get_deployment_handle` would give the one of an earlier test.
    """
    from ray.serve.handle import DeploymentHandle

    return DeploymentHandle("FlashEngine", app_name)


@pytest.fixture
def engine(app: RunningApp) -> Any:
    return engine_handle("flashray")


@pytest.fixture
def backend(engine: Any) -> LocalBackend:
    return LocalBackend(engine, lease_s=2.0)
