from pathlib import Path

import pytest

from deployments.config import AppConfig, load_config
from deployments.errors import ConfigError
from deployments.flash_engine import engine_config
from deployments.keys import demo_key, is_loopback, with_key
from engine.cache.tier_config import TierConfig
from router.identity import hash_key


def test_defaults_are_the_cpu_demo():
    config = AppConfig()
    assert config.model == "smollm2-135m-instruct"
    assert config.engine.device == "cpu"
    assert config.http.host == "127.0.0.1"


def test_yaml_is_read(tmp_path: Path):
    file = tmp_path / "app.yaml"
    file.write_text("aliases: [small]\nengine: {max_model_len: 2048}\nhttp: {port: 9000}\n")
    config = load_config(file)
    assert config.aliases == ("small",)
    assert config.engine.max_model_len == 2048
    assert config.http.port == 9000


def test_tiers_of_the_cache_reach_the_engine(tmp_path: Path):
    file = tmp_path / "app.yaml"
    tiers = "{cold_format: int4, warm_tokens: 0, calibration: c.json, skip_epsilon: 0.03}"
    file.write_text(f"engine: {{kv_tiers: {tiers}}}\n")
    cache = engine_config("model", load_config(file).engine).cache
    assert cache.tiers == TierConfig(cold_format="int4", warm_tokens=0, skip_epsilon=0.03)
    assert cache.calibration == Path("c.json")
    assert engine_config("model", AppConfig().engine).cache.tiers is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine: {max_modellen: 3}", "engine.max_modellen"),
        ("http: {port: 99999}", "http.port"),
        ("engine: {kv_cache_gib: 0}", "engine.kv_cache_gib"),
        ("engine: {itl_budget_ms: -1}", "engine.itl_budget_ms"),
        ("engine: {quantization: int3}", "engine.quantization"),
        ("engine: {quantization: fp8, deterministic: true}", "fp8 is not deterministic"),
        ("engine: {cold_tier_gib: -1}", "engine.cold_tier_gib"),
        ("engine: {cold_tier_chunk_mib: 0}", "engine.cold_tier_chunk_mib"),
        ("engine: {cold_tier_gib: 0.01}", "less than two chunks of 4 MiB"),
        ("engine: {cold_tier_gib: 1, enable_prefix_cache: false}", "needs enable_prefix_cache"),
        ("engine: {kv_tiers: {cold_format: int3}}", "engine.kv_tiers.cold_format"),
        (
            "engine: {kv_tiers: {hot_tokens: 100}}",
            "hot_tokens must be a multiple of the block",
        ),
        ("engine: {kv_tiers: {}, tensor_parallel_size: 2}", "ranks cannot share a tiered cache"),
        ("engine: {kv_tiers: {}, cold_tier_gib: 1}", "kv_tiers with cold_tier_gib"),
        ("engine: {kv_tiers: {skip_epsilon: 1}}", "skip_epsilon must be above 0 and below 1"),
        (
            "engine: {kv_tiers: {skip_epsilon: 0.1}, deterministic: true}",
            "skip_epsilon are not deterministic",
        ),
        ("colour: red", "colour"),
        ("- a list", "app.yaml"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_faults_name_file_and_field(tmp_path: Path, text: str, words: str):
    file = tmp_path / "app.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"app\.yaml") as error:
        load_config(file)
    assert words in str(error.value)


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_a_key_is_made_up_when_none_is_given(monkeypatch):
    monkeypatch.delenv("FLASHRAY_DEMO_KEY", raising=False)
    first, second = demo_key("127.0.0.1"), demo_key("0.0.0.0")
    assert not first.was_given
    assert first.key != second.key
    assert len(first.key) > 30


def test_a_demo_key_stays_on_this_machine(monkeypatch):
    monkeypatch.setenv("FLASHRAY_DEMO_KEY", "sk-demo-123")
    assert demo_key("127.0.0.1").was_given
    with pytest.raises(ConfigError, match="FLASHRAY_DEMO_KEY is for this machine alone"):
        demo_key("0.0.0.0")


def test_only_the_hash_of_a_key_goes_into_the_config(monkeypatch):
    monkeypatch.setenv("FLASHRAY_DEMO_KEY", "sk-demo-123")
    config = with_key(AppConfig(), demo_key("127.0.0.1"))
    assert config.key_hashes == {hash_key("sk-demo-123"): "demo"}
    assert "sk-demo-123" not in repr(config)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_loopback(host: str, expected: bool):
    assert is_loopback(host) is expected
