"""Whatever changes the bytes of a block changes its address, and nothing else does."""

from dataclasses import replace

from engine.cache.block_address import CacheVersion, SequenceAddresses
from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig

VERSION = CacheVersion(
    weights_sha="0" * 64,
    layer_group="all",
    tp_size=2,
    tp_rank=0,
    tiers=TierConfig(),
    layout=1,
    rotation="hadamard",
    calibration="none",
)
CHAIN = [bytes([index]) * 16 for index in range(4)]


def addresses(decode_start: int | None = None, version: bytes = b"v") -> SequenceAddresses:
    return SequenceAddresses(version, CHAIN, b"tenant", 64, decode_start)


def test_every_part_of_the_version_counts() -> None:
    changed = [
        replace(VERSION, weights_sha="1" * 64),
        replace(VERSION, layer_group="local"),
        replace(VERSION, tp_size=1),
        replace(VERSION, tp_rank=1),
        replace(VERSION, tiers=TierConfig(cold_format="int4")),
        replace(VERSION, tiers=TierConfig(warm_tokens=256)),
        replace(VERSION, layout=2),
        replace(VERSION, rotation="none"),
        replace(VERSION, calibration="f00d"),
        replace(VERSION, adapter="lora"),
    ]
    digests = {version.digest() for version in (VERSION, *changed)}
    assert len(digests) == 1 + len(changed)
    assert replace(VERSION).digest() == VERSION.digest()


def test_an_address_says_part_format_tokens_and_how_it_came_to_be() -> None:
    plain = addresses()
    different = {
        plain.of(Part.KEYS, 2, Format.INT4),
        plain.of(Part.VALUES, 2, Format.INT4),
        plain.of(Part.KEYS, 2, Format.INT8),
        plain.of(Part.KEYS, 1, Format.INT4),
        plain.of(Part.KEYS, 2, Format.INT4, is_requantised=True),
        addresses(decode_start=130).of(Part.KEYS, 2, Format.INT4),
        addresses(decode_start=131).of(Part.KEYS, 2, Format.INT4),
        addresses(version=b"w").of(Part.KEYS, 2, Format.INT4),
    }
    assert len(different) == 8
    assert None not in different


def test_a_block_that_prefill_made_keeps_its_address_when_decode_begins_behind_it() -> None:
    for decode_start in (128, 200):
        assert addresses(decode_start).of(Part.KEYS, 1, Format.BF16) == addresses().of(
            Part.KEYS, 1, Format.BF16
        )
    assert addresses(127).of(Part.KEYS, 1, Format.BF16) != addresses().of(Part.KEYS, 1, Format.BF16)


def test_a_block_that_is_not_full_has_none() -> None:
    assert addresses().of(Part.KEYS, 4, Format.BF16) is None
