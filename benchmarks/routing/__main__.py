"""`python -m benchmarks.routing`: results/routing-cpu.json, in about two minutes."""

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.command import Progress, run_benchmark
from benchmarks.results import Row
from benchmarks.routing.driver import ask_all
from benchmarks.routing.workload import hot_prefixes, oracle_cached_tokens
from cluster.bringup import LocalRay, RayOptions
from deployments.config import EngineSettings

GATE = (
    "tests/unit/router/test_affinity.py",
    "tests/unit/deployments/test_replica_router.py",
    "tests/serve/test_replicas_on_ray.py",
)
PACKAGES = ("ray", "torch")
NUM_REPLICAS = 4
NUM_AT_ONCE = 16
KV_CACHE_GIB = 0.006  # 384 blocks of each replica; all prefixes are some 580
MIN_HIT_SHARE = 0.9
MAX_LOAD_SKEW = 1.5
OURS, PEER = "prefix and load", "Serve's power of two"


def measure(progress: Progress) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, LocalRay(_ray_options()):
        model_path = str(_tiny_model(Path(folder) / "tiny"))
        for num_routers in (1, 2):
            progress(f"{PEER}, routers: {num_routers}")
            peer = _measured(model_path, num_routers, by_prefix=False)
            progress(f"{OURS}, routers: {num_routers}")
            ours = _measured(model_path, num_routers, by_prefix=True)
            rows += _rows(num_routers, ours, peer)
    return rows


def _measured(model_path: str, num_routers: int, *, by_prefix: bool) -> tuple[float, float]:
    """The share of the oracle's cached tokens, and the busiest replica's tokens over the mean."""
    requests = hot_prefixes()
    with _engines(model_path, by_prefix) as app_name:
        usages, tokens = ask_all(requests, app_name, num_routers, NUM_AT_ONCE)
    cached_tokens = sum(usage.cached_tokens for usage in usages)
    return cached_tokens / oracle_cached_tokens(requests), max(tokens) * len(tokens) / sum(tokens)


def _rows(num_routers: int, ours: tuple[float, float], peer: tuple[float, float]) -> list[Row]:
    case = f"{num_routers} router{'s'[: num_routers - 1]}"
    (hits, skew), (peer_hits, peer_skew) = ours, peer
    return [
        Row(f"{case}: hits of oracle's", "hit_share", "share", "higher", hits, PEER, peer_hits,
            MIN_HIT_SHARE),
        Row(f"{case}: load max/mean", "load_skew", "ratio", "lower", skew, PEER, peer_skew,
            MAX_LOAD_SKEW),
    ]  # fmt: skip


@contextmanager
def _engines(model_path: str, by_prefix: bool) -> Iterator[str]:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from benchmarks.routing.power_of_two import PowerOfTwo
    from deployments.flash_engine import engine_deployment

    settings = EngineSettings(num_replicas=NUM_REPLICAS, kv_cache_gib=KV_CACHE_GIB)
    app = engine_deployment(model_path, settings)
    if not by_prefix:
        config = {"request_router_class": PowerOfTwo}
        deployment = app._bound_deployment.options(request_router_config=config)
        app = deployment.bind(model_path, settings)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(logging_config=quiet)
    serve.run(app, name="routing", route_prefix=None, logging_config=quiet)
    try:
        yield "routing"
    finally:
        serve.delete("routing")


def _ray_options() -> RayOptions:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return RayOptions(num_cpus=NUM_REPLICAS + 4, num_gpus=0, include_dashboard=False)


def _tiny_model(folder: Path) -> Path:
    """Random weights: what a model says does not change where it is asked."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(run_benchmark("routing-cpu", GATE, measure, PACKAGES, "benchmarks.routing"))
