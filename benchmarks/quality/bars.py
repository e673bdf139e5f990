"""What a cache may cost in answers, and the rows that say what it did."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.recall import DEPTHS, PASSKEY
from benchmarks.quality.settings import BY_NAME, FLOOR
from benchmarks.results import Row

PROSE, CODE = "prose", "code"
BOTH = (PROSE, CODE)
FOUR_BIT_PEERS = ("vllm_int4", "int4_by_token", "kivi4")
ENGINES = tuple(each.name for each in BY_NAME.values() if each.kind == "engine")
NATS = "nats a token"

Found = Mapping[str, Any]  # by setting: by text, what `Scores.as_json` says; an engine's "recall"


@dataclass(frozen=True, slots=True)
class Bar:
    """On the worse of `texts`."""

    case: str
    setting: str
    figure: str
    texts: tuple[str, ...]
    floor: float


BARS = (
    Bar("kl_int4_prose", "int4", "kl", (PROSE,), 0.0012),
    Bar("kl_int4_code", "int4", "kl", (CODE,), 0.002),
    Bar("kl_k8v4", "k8v4", "kl", BOTH, 0.0003),
    Bar("kl_int8", "int8", "kl", BOTH, 5e-5),
    Bar("top1_int4", "int4", "top1", BOTH, 0.98),
    Bar("top1_k8v4", "k8v4", "top1", BOTH, 0.992),
)
PASSKEY_EQUAL = "passkey_equal"
FOUND_AS_EXACT = (
    f"passkeys found where the exact cache finds them, and missed where it does, {len(DEPTHS)} "
    "depths, the worst engine with tiers"
)
METRICS = {"kl": "KL(exact || it), in float32", "top1": "likeliest token as exact, in float32"}
IN_ENGINE = (
    "KL(exact || it), the engine in bfloat16, whose rounding alone comes to that of the peer"
)


def rows_of(found: Found) -> Iterator[Row]:
    """Of the settings that were measured. Beside int4: each peer's format of 4 bits, emulated."""
    for bar in BARS:
        if bar.setting in found:
            yield _row(bar, found)
    yield from _peer_rows(found)
    yield from _engine_rows(found)
    yield from _passkey_row(found)


def _row(bar: Bar, found: Found) -> Row:
    metric = f"{METRICS[bar.figure]}, {' and '.join(bar.texts)}"
    ours = _worst(found[bar.setting], bar.figure, bar.texts)
    if bar.figure == "top1":
        return Row(bar.case, metric, "1", "higher", ours, floor=bar.floor)
    return Row(bar.case, metric, NATS, "lower", ours, floor=bar.floor)


def _peer_rows(found: Found) -> Iterator[Row]:
    """Better than each of them."""
    for text in BOTH:
        for peer in FOUR_BIT_PEERS:
            if "int4" in found and peer in found:
                kls = (_worst(found[name], "kl", (text,)) for name in ("int4", peer))
                yield Row(
                    f"kl_int4_{text}_vs_{peer}",
                    f"{METRICS['kl']}, {text}",
                    NATS,
                    "lower",
                    next(kls),
                    BY_NAME[peer].title + ", emulated",
                    next(kls),
                    floor=1.0,
                    floor_of="ratio",
                )


def _engine_rows(found: Found) -> Iterator[Row]:
    """No bar: most of it is rounding."""
    for name in ENGINES:
        if name in found and FLOOR in found:
            for text in BOTH:
                kls = [_worst(found[each], "kl", (text,)) for each in (name, FLOOR)]
                case, title = f"kl_{name}_{text}", BY_NAME[FLOOR].title
                yield Row(case, f"{IN_ENGINE}, {text}", NATS, "lower", kls[0], title, kls[1])


def _passkey_row(found: Found) -> Iterator[Row]:
    recalled = [found[name]["recall"] for name in ENGINES if name in found]
    shares = [each[f"{PASSKEY}_equal"] for each in recalled if each]
    if shares:
        yield Row(PASSKEY_EQUAL, FOUND_AS_EXACT, "1", "higher", min(shares), floor=1.0)


def _worst(of_setting: Mapping[str, Any], figure: str, texts: Items[str]) -> float:
    means = [of_setting[text][figure][0] for text in texts]
    return float(min(means) if figure == "top1" else max(means))
