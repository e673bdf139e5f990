import json

import pytest
from pydantic import ValidationError

from cluster.placement import RankResources, bundle_of, engine_bundles
from deployments.cold_store import ColdStoreLimits
from deployments.config import EngineSettings
from deployments.errors import ConfigError
from deployments.flash_engine import cold_limits, engine_config, engine_deployment


@pytest.fixture
def model_path(tmp_path):
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return str(tmp_path)


def test_a_size_that_does_not_divide_the_heads_is_refused_before_anything_starts(model_path):
    with pytest.raises(ConfigError, match=r"9 attention heads and 3 KV heads.* one of 1, 3, 9$"):
        engine_deployment(model_path, EngineSettings(tensor_parallel_size=2))


def test_one_bundle_for_the_shell_and_one_for_each_rank(model_path):
    settings = EngineSettings(tensor_parallel_size=3, gpus_per_rank=1)
    deployment = engine_deployment(model_path, settings)._bound_deployment
    config = deployment._replica_config
    assert config.placement_group_bundles == [{"CPU": 0.1}, *[{"CPU": 1.0, "GPU": 1.0}] * 3]
    assert config.placement_group_strategy == "STRICT_PACK"


def test_bundles_hold_no_zeros_and_ranks_follow_the_shell():
    assert engine_bundles(1, RankResources(), 0.1) == [{"CPU": 0.1}, {"CPU": 1.0}]
    assert [bundle_of(rank) for rank in range(3)] == [1, 2, 3]


def test_what_depends_on_the_device():
    on_gpu, on_cpu = EngineSettings(device="cuda"), EngineSettings()
    assert (on_gpu.num_gpus_per_rank, on_gpu.stall_timeout_s) == (1, 10)
    assert (on_cpu.num_gpus_per_rank, on_cpu.stall_timeout_s) == (0, 60)
    told = EngineSettings(device="cuda", gpus_per_rank=0.5, step_timeout_s=33)
    assert (told.num_gpus_per_rank, told.stall_timeout_s) == (0.5, 33)


@pytest.mark.parametrize(
    ("device", "told", "itl_budget_ms"),
    [("cpu", None, None), ("cuda", None, 50.0), ("cuda:1", 0, None), ("cpu", 30, 30.0)],
)
def test_a_step_has_a_time_budget_on_a_gpu_or_when_told(device, told, itl_budget_ms):
    settings = EngineSettings(device=device, itl_budget_ms=told)
    assert engine_config("/nowhere", settings).scheduler.itl_budget_ms == itl_budget_ms


def test_the_engine_is_told_how_its_weights_are_quantised():
    assert engine_config("model", EngineSettings()).quantization is None
    assert engine_config("model", EngineSettings(quantization="fp8")).quantization == "fp8"


def test_the_engine_is_told_to_make_its_weights_up():
    assert engine_config("/m", EngineSettings(load_format="dummy")).load_format == "dummy"
    assert engine_config("/m", EngineSettings()).load_format == "auto"


def test_the_engine_is_told_its_attention_backend():
    assert engine_config("model", EngineSettings()).attention_backend == "auto"
    told = EngineSettings(attention_backend="triton")
    assert engine_config("model", told).attention_backend == "triton"
    with pytest.raises(ValidationError, match="attention_backend"):
        EngineSettings(attention_backend="flash")


def test_the_cold_store_gets_its_limits_or_does_not_exist():
    for off in (None, 0):
        assert cold_limits(EngineSettings(cold_tier_gib=off)) is None
    settings = EngineSettings(cold_tier_gib=2, cold_tier_tenant_share=0.25, cold_tier_chunk_mib=1)
    assert cold_limits(settings) == ColdStoreLimits(2 << 30, 512 << 20, 1 << 20)
