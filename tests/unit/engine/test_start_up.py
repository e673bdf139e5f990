import logging
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from engine.build import build_model_runner
from engine.config import CacheConfig, EngineConfig
from engine.errors import EngineError
from engine.execution.memory import GIB, MemoryProfile
from engine.start_up import StartUp
from tests.unit.engine.tiny_checkpoint import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


def test_phases_are_said_as_they_begin_and_end(caplog: pytest.LogCaptureFixture) -> None:
    times = count(step=1.5)
    start = StartUp(clock=lambda: next(times))
    with caplog.at_level(logging.INFO):
        with start.phase("weights"):
            pass
        with start.phase("KV cache"):
            pass
    assert caplog.messages == ["weights ...", "weights: 1.5 s", "KV cache ...", "KV cache: 1.5 s"]
    assert start.report() == "ready in 3.0 s (weights 1.5, KV cache 1.5)"


def test_a_phase_that_fails_is_not_said_to_be_done(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ValueError, match="broken"),
        StartUp().phase("weights"),
    ):
        raise ValueError("broken")
    assert caplog.messages == ["weights ..."]


def test_a_runner_reports_its_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_model_runner(EngineConfig(folder, max_model_len=64))
    (report,) = [message for message in caplog.messages if message.startswith("ready in")]
    for phase in ("weights", "KV cache", "CUDA graphs", "128 blocks of 64 tokens"):
        assert phase in report


def test_what_is_left_is_for_keys_and_values() -> None:
    profile = MemoryProfile(140 * GIB, 16 * GIB, 2 * GIB, GIB, 14 * GIB)
    assert profile.kv_cache == 107 * GIB
    assert str(profile) == (
        "140.0 GiB = weights and others 16.0 + largest step 2.0 + graphs 1.0 + kept free 14.0 "
        "+ KV cache 107.0"
    )


def test_pages_of_prompts_are_not_left_for_keys_and_values() -> None:
    profile = MemoryProfile(140 * GIB, 16 * GIB, 2 * GIB, GIB, 14 * GIB, pages=3 * GIB)
    assert profile.kv_cache == 104 * GIB
    assert "+ graphs 1.0 + pages of prompts 3.0 + kept free 14.0 + KV cache 104.0" in str(profile)


def test_lists_of_what_is_skipped_are_not_left_for_keys_and_values() -> None:
    profile = MemoryProfile(140 * GIB, 16 * GIB, 2 * GIB, GIB, 14 * GIB, 3 * GIB, skips=GIB)
    assert profile.kv_cache == 103 * GIB
    assert "+ pages of prompts 3.0 + skip lists 1.0 + kept free 14.0" in str(profile)


def test_bytes_are_measured_on_a_gpu_only(folder: Path) -> None:
    with pytest.raises(EngineError, match="kv_cache_bytes None needs a GPU; say how many bytes"):
        build_model_runner(EngineConfig(folder, cache=CacheConfig(kv_cache_bytes=None)))


def test_an_unknown_load_format_is_refused_by_its_name(folder: Path) -> None:
    config = EngineConfig(folder, max_model_len=64)
    with pytest.raises(EngineError, match="load_format must be one of auto, dummy, got 'lazy'"):
        build_model_runner(replace(config, load_format="lazy"))
