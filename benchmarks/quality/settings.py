"""What is compared: the engine's own caches as they serve, in bfloat16; and formats, ours and
peers', put into its exact cache in float32, where nothing else is rounded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.quality import formats
from benchmarks.quality.formats import Format, OurFormat
from engine.cache.tier_config import TierConfig

AGES = TierConfig()  # how old a token is when it gets warm, and cold
NEVER_TOKENS = 1 << 16  # older than any
BF16_BYTES = 2

Kind = Literal["engine", "ours", "ablation", "peer", "noise"]


@dataclass(frozen=True, slots=True)
class Cache:
    """How an engine is built. `tiers` None: its exact cache."""

    dtype: str = "bfloat16"
    tiers: TierConfig | None = None
    is_deterministic: bool = False

    @property
    def exact(self) -> "Cache":
        """What it is held against."""
        return Cache(self.dtype)

    @property
    def is_emulated(self) -> bool:
        """Formats are put into it; it is no cache that serves."""
        return self == IN_FLOAT32


@dataclass(frozen=True, slots=True)
class Emulated:
    """What a token is replaced by when it gets warm (None: it stays), when it gets cold, and when
    it gets cold after it was warm."""

    tiers: TierConfig
    warm: Format | None
    cold: Format
    cold_of_warm: Format


@dataclass(frozen=True, slots=True)
class Setting:
    """`cold`: the format whose bytes count; None: bf16."""

    name: str
    kind: Kind
    title: str
    cache: Cache
    cold: Format | None = None
    emulated: Emulated | None = None

    def num_bytes(self, head_dim: int) -> float:
        """Of a cold token's key and value in one head."""
        return 2 * BF16_BYTES * head_dim if self.cold is None else self.cold.num_bytes(head_dim)


IN_FLOAT32 = Cache("float32")


def _engine(name: str, cold_format: str, cold: Format) -> Setting:
    cache = Cache(tiers=replace(AGES, cold_format=cold_format))
    return Setting(name, "engine", f"{cold_format}, in the engine", cache, cold)


def _ours(name: str, kind: Kind, title: str, cold: OurFormat, tiers: TierConfig = AGES) -> Setting:
    emulated = Emulated(tiers, formats.INT8, cold, cold.of_int8)
    return Setting(name, kind, title, IN_FLOAT32, cold, emulated)


def _peer(name: str, kind: Kind, title: str, cold: Format) -> Setting:
    """What is warm with us stays exact with them."""
    return Setting(name, kind, title, IN_FLOAT32, cold, Emulated(AGES, None, cold, cold))


FLOOR = "none_aged"
SETTINGS = (
    _ours("int4", "ours", "int4", formats.INT4),
    _ours("k8v4", "ours", "k8v4", formats.K8V4),
    _ours("int8", "ours", "int8", formats.INT8),
    _ours(
        "int4_no_warm",
        "ablation",
        "int4 without a warm tier",
        formats.INT4,
        replace(AGES, warm_tokens=0),
    ),
    _peer("int4_unrotated", "ablation", "int4 without rotation", formats.INT4_UNROTATED),
    _peer("vllm_int4", "peer", "vLLM's int4_per_token_head", formats.INT4_BY_TOKEN_ROTATED),
    _peer("int4_by_token", "peer", "4 bits by token, not rotated", formats.INT4_BY_TOKEN),
    _peer("kivi4", "peer", "KIVI, 4 bits", formats.KIVI_4),
    _peer("kivi2", "peer", "KIVI, 2 bits", formats.KIVI_2),
    _engine("engine_int4", "int4", formats.INT4),
    _engine("engine_k8v4", "k8v4", formats.K8V4),
    _engine("engine_int8", "int8", formats.INT8),
    Setting(
        FLOOR,
        "noise",
        "tiers, all tokens still hot",
        Cache(tiers=replace(AGES, hot_tokens=NEVER_TOKENS, warm_tokens=0)),
    ),
    Setting("deterministic", "noise", "no tiers, deterministic", Cache(is_deterministic=True)),
)
BY_NAME = {each.name: each for each in SETTINGS}


def in_turn(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Of one cache, what is measured together: ours and peers', then the others."""
    first = [each for each in settings if each.kind != "ablation"]
    last = [each for each in settings if each.kind == "ablation"]
    return [each for each in (first, last) if each]


def by_cache(settings: Sequence[Setting]) -> dict[Cache, list[Setting]]:
    """What one engine measures, in one batch; those of a dtype one after the other."""
    found: dict[Cache, list[Setting]] = {}
    for each in sorted(settings, key=lambda setting: setting.cache.dtype, reverse=True):
        found.setdefault(each.cache, []).append(each)
    return found
