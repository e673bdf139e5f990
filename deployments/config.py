"""The one configuration of an app, from YAML or defaults: what every deployment is built from."""

import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.backend_settings import BackendSettings
from deployments.errors import ConfigError
from deployments.model_files import BUILT_IN_MODEL
from engine.cache.tier_config import TierConfig
from router.routes import routes_from_list
from router.teams import Team, teams_by_key_hash, teams_from_mapping


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class KvTiersSettings(Settings):
    """How the KV of a token ages (docs/kv-tiers.md). `calibration`: a file of `flashray calibrate`,
    which gives each layer its cold format. `skip_epsilon` above 0: of a query's softmax, what a
    decode step may leave out of the cold tier (docs/certified-skipping.md)."""

    cold_format: Literal["k8v4", "int4", "int8"] = "k8v4"
    sink_tokens: int = 64
    hot_tokens: int = 128
    warm_tokens: int = 512
    calibration: Path | None = None
    skip_epsilon: float = 0.0

    @property
    def tiers(self) -> TierConfig:
        return TierConfig(
            cold_format=self.cold_format,
            sink_tokens=self.sink_tokens,
            hot_tokens=self.hot_tokens,
            warm_tokens=self.warm_tokens,
            skip_epsilon=self.skip_epsilon,
        )

    @model_validator(mode="after")
    def _are_whole_blocks(self) -> Self:
        _ = self.tiers
        return self


class EngineSettings(Settings):
    """`max_model_len` null takes the checkpoint's. Each of `num_replicas` engines holds the whole
    model; `tensor_parallel_size` ranks share it, one actor each; `kv_cache_gib` is of each rank,
    null: 1 on a CPU, on a GPU all that is left within `gpu_memory_utilization` of its memory.
    `max_num_sequences` null: 256 on a GPU, else 32; `max_num_batched_tokens`: 8192, else 256.
    `gpus_per_rank` null: 1 on a GPU, else 0. `step_timeout_s`: work in flight and no finished step
    for so long ends the ranks, which are then started again; null: 10 on a GPU, else 60.
    `load_format` dummy: random weights, to measure speed: the model folder needs none.
    `itl_budget_ms`: what a step with decodes may take; null: 50 on a GPU, else none; 0: none.
    `kv_tiers` null: all KV stays in the dtype of the model."""

    device: str = "cpu"
    dtype: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    attention_backend: Literal["auto", "triton", "vllm_flash_attn", "torch"] = "auto"
    num_replicas: int = Field(default=1, ge=1, le=64)
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    gpus_per_rank: float | None = Field(default=None, ge=0, le=1)
    max_model_len: int | None = Field(default=None, ge=64)
    kv_cache_gib: float | None = Field(default=None, gt=0)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    deterministic: bool = False
    quantization: Literal["fp8"] | None = None
    enforce_eager: bool = False
    max_num_sequences: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    itl_budget_ms: float | None = Field(default=None, ge=0)
    enable_prefix_cache: bool = True
    kv_tiers: KvTiersSettings | None = None
    cold_tier_gib: float | None = Field(default=None, ge=0)
    cold_tier_tenant_share: float = Field(default=0.5, gt=0, le=1)
    cold_tier_chunk_mib: int = Field(default=4, ge=1, le=64)
    num_threads: int = Field(default=1, ge=1)
    step_timeout_s: float | None = Field(default=None, gt=0)
    lease_s: float = Field(default=10.0, gt=0)
    retention_s: float = Field(default=60.0, gt=0)

    @property
    def has_weights(self) -> bool:
        return self.load_format != "dummy"

    @property
    def is_on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def num_gpus_per_rank(self) -> float:
        return float(self.is_on_gpu) if self.gpus_per_rank is None else self.gpus_per_rank

    @property
    def stall_timeout_s(self) -> float:
        return self.step_timeout_s or (10.0 if self.is_on_gpu else 60.0)

    @property
    def step_budget_ms(self) -> float | None:
        if self.itl_budget_ms is None:
            return 50.0 if self.is_on_gpu else None
        return self.itl_budget_ms or None

    @property
    def max_step_sequences(self) -> int:
        return self.max_num_sequences or (256 if self.is_on_gpu else 32)

    @property
    def max_step_tokens(self) -> int:
        return self.max_num_batched_tokens or (8192 if self.is_on_gpu else 256)

    @property
    def kv_cache_bytes(self) -> int | None:
        """None: to be measured."""
        gib = self.kv_cache_gib
        if gib is None and not self.is_on_gpu:
            gib = 1.0
        return None if gib is None else int(gib * (1 << 30))

    @property
    def cold_tier_bytes(self) -> int:
        return int((self.cold_tier_gib or 0) * (1 << 30))

    @model_validator(mode="after")
    def _quantised_products_depend_on_the_batch(self) -> Self:
        if self.quantization is not None and self.deterministic:
            raise ValueError(
                f"quantization {self.quantization} is not deterministic; leave out either"
            )
        return self

    @model_validator(mode="after")
    def _cold_tier_holds_cached_blocks(self) -> Self:
        chunk_bytes = self.cold_tier_chunk_mib << 20
        if self.cold_tier_bytes and not self.enable_prefix_cache:
            raise ValueError("cold_tier_gib needs enable_prefix_cache: it keeps cached blocks")
        if 0 < self.cold_tier_bytes * self.cold_tier_tenant_share < 2 * chunk_bytes:
            raise ValueError(
                f"cold_tier_gib {self.cold_tier_gib} leaves a tenant with a share of "
                f"{self.cold_tier_tenant_share} less than two chunks of {self.cold_tier_chunk_mib} "
                "MiB; raise either or lower cold_tier_chunk_mib"
            )
        return self

    @model_validator(mode="after")
    def _tiers_are_of_one_rank(self) -> Self:
        if self.kv_tiers is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"kv_tiers with tensor_parallel_size {self.tensor_parallel_size}: ranks cannot "
                "share a tiered cache yet; leave out either"
            )
        if self.kv_tiers is not None and self.cold_tier_bytes:
            raise ValueError(
                "kv_tiers with cold_tier_gib: a cold store cannot take blocks of a tiered cache "
                "yet; leave out either"
            )
        return self

    @model_validator(mode="after")
    def _what_is_skipped_depends_on_others(self) -> Self:
        if self.deterministic and self.kv_tiers is not None and self.kv_tiers.skip_epsilon:
            raise ValueError(
                "kv_tiers with skip_epsilon are not deterministic: what a step leaves out depends "
                "on what ran beside the step before; leave out either"
            )
        return self

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> Self:
        if self.max_step_sequences > self.max_step_tokens:
            raise ValueError(
                f"max_num_sequences {self.max_step_sequences} > max_num_batched_tokens "
                f"{self.max_step_tokens}: a step must hold one token of every sequence"
            )
        return self


class RouterSettings(Settings):
    num_replicas: int = Field(default=1, ge=1)
    keep_alive_s: float = Field(default=10.0, gt=0, le=15)
    max_body_mib: int = Field(default=32, ge=1)
    max_ongoing_requests: int = Field(default=1000, ge=1)
    max_running_requests: int = Field(default=256, ge=1)
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()


class LimitSettings(Settings):
    """`store`: `embedded` (one machine), a redis:// or unix:// URL, or `none`. Its password comes
    from the environment variable `password_env`, never from here."""

    store: str = Field(default="embedded", pattern=r"^(embedded|none|(rediss?|unix)://.+)$")
    password_env: str | None = None
    timeout_s: float = Field(default=0.25, gt=0, le=10)  # then this replica's share counts
    lease_s: float = Field(default=60.0, ge=20)  # several times the renewal interval
    requests_per_minute_per_address: int = Field(default=100, ge=1)


class AuditSettings(Settings):
    """`folder` null: `$FLASHRAY_STATE/audit`, by default `~/.local/state/flashray/audit`."""

    folder: Path | None = None


class HttpSettings(Settings):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)


class AppConfig(Settings):
    """`key_hashes` maps the SHA-256 of an API key to its team; `teams` holds keys, rights and
    limits of teams (router/teams.py). A team that is only in `key_hashes` has no limits. `routes`
    (router/routes.py) say which of `backends`, and the engine, answer for a model."""

    model: str = BUILT_IN_MODEL
    served_name: str | None = None
    aliases: tuple[str, ...] = ()
    key_hashes: dict[str, str] = Field(default_factory=dict)
    teams: tuple[dict[str, Any], ...] = ()
    backends: tuple[BackendSettings, ...] = ()
    routes: tuple[dict[str, Any], ...] = ()
    engine: EngineSettings = EngineSettings()
    router: RouterSettings = RouterSettings()
    limits: LimitSettings = LimitSettings()
    audit: AuditSettings = AuditSettings()
    http: HttpSettings = HttpSettings()

    @field_validator("teams")
    @classmethod
    def _are_teams(cls, teams: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        teams_from_mapping({"teams": list(teams)})
        return teams

    @model_validator(mode="after")
    def _routes_lead_to_backends(self) -> Self:
        names = [backend.name for backend in self.backends]
        if len(set(names)) < len(names):
            raise ValueError(f"backends: expected a name of its own for each, got {names}")
        routes_from_list(self.routes, names)
        return self

    @field_validator("key_hashes")
    @classmethod
    def _holds_hashes_only(cls, key_hashes: dict[str, str]) -> dict[str, str]:
        for position, key_hash in enumerate(key_hashes, start=1):
            if not re.fullmatch("[0-9a-f]{64}", key_hash):
                raise ValueError(
                    f"entry {position}: expected the SHA-256 of a key, 64 lower-case hex digits, "
                    "never a key itself (printf %s KEY | sha256sum)"
                )
        return key_hashes


def teams_of(config: AppConfig) -> tuple[Team, ...]:
    return teams_from_mapping({"teams": list(config.teams)})


def team_names_by_key_hash(config: AppConfig) -> dict[str, str]:
    return {**teams_by_key_hash(teams_of(config)), **config.key_hashes}


def load_config(file: Path) -> AppConfig:
    """Raises ConfigError naming the file and every wrong field."""
    try:
        content: Any = yaml.safe_load(file.read_text()) or {}
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"{file}: cannot be read as YAML: {exc}") from exc
    try:
        return AppConfig.model_validate(content)
    except ValidationError as exc:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            for fault in exc.errors()
        )
        raise ConfigError(f"{file}: {faults}") from exc
