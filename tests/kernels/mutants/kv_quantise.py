"""Mutants of kv_quantise: of keys and of values."""

from functools import partial
from typing import Any

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    StoredInput,
)
from kernels.kv_quantise import reference
from kernels.kv_quantise.layout import slabs_of_block
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.quantised_blocks import arena


def case(kind: str, from_bits: int, bits: int, size: int, grain: int) -> tuple[Any, ...]:
    slabs, meta, sources, others = arena(kind, from_bits, size, grain=grain)
    targets = others[: 2 * slabs_of_block(bits)].view(2, -1)
    return slabs, meta, sources, targets, from_bits, bits


def op(kind: str) -> Op:
    return Op(
        "kv_quantise",
        f"quantise_{kind}",
        getattr(reference, f"quantise_{kind}"),
        {
            f"{from_bits} to {bits} bits, size {size}, grains of {grain}": partial(
                case, kind, from_bits, bits, size, grain
            )
            for from_bits, bits, size, grain in (
                (16, 4, 64, 1),
                (16, 8, 128, 1),
                (8, 4, 64, 1),
                (16, 8, 64, 2),
            )
        },
    )


KEYS, VALUES = op("keys"), op("values")
MUTANTS = {
    KEYS: [
        Mutant("bytes in their places", "return byte % 2 * 2 + byte // 2", "return byte", DIFFERS),
        Mutant(
            "steps of another number",
            "LEVELS: tl.constexpr = 2**BITS - 1",
            "LEVELS: tl.constexpr = 2**BITS",
            DIFFERS,
            within="affine",
        ),
        Mutant(
            "a zero that is not known well enough",
            "scale = tl.maximum(scale, tl.maximum(-least, greatest) * (1 / MAX_ZERO))",
            "scale = scale",
            DIFFERS,
        ),
        Mutant("no scale at all", "tl.maximum(scale, MIN_SCALE)", "scale", DIFFERS),
        Mutant("codes cut off", "+ ROUNDER - ROUNDER", "+ 0", DIFFERS),
        Mutant(
            "codes past the last", "tl.minimum(tl.maximum(codes, 0.0), LEVELS)", "codes", DIFFERS
        ),
        Mutant("high nibbles like low ones", "16 if BITS + half == 5 else 1", "1", DIFFERS),
        Mutant(
            "tokens in order",
            "row // 32 * 32 + row // 8 % 2 * 16 + lane * 4 + row // 16 % 2 * 2 + own",
            "row",
            DIFFERS,
        ),
        Mutant("half of the channels", "half * HALF + channel", "channel", DIFFERS),
        Mutant(
            "metadata in order of bytes",
            "in_meta = column - in_lane % 4 + place_of_byte(in_lane % 4)",
            "in_meta = column",
            DIFFERS,
        ),
        Mutant(
            "metadata of the first slab alone",
            "for nth in tl.static_range(BITS // 4 // GRAIN):",
            "for nth in tl.static_range(1):",
            DIFFERS,
        ),
        Mutant(
            "a slot too many",
            "for nth in tl.static_range(BITS // 4 // GRAIN):",
            "for nth in tl.static_range(BITS // 4):",
            DoubleStore,
            "store of meta",
        ),
        Mutant(
            "slots by slabs",
            "nth * GRAIN, num_slabs, GRAIN) // GRAIN",
            "nth * GRAIN, num_slabs, GRAIN)",
            OutOfBounds,
            "store of meta",
        ),
        Mutant(
            "slots where slabs are counted",
            "num_slabs = num_slots * GRAIN",
            "num_slabs = num_slots",
            DeviceAssertion,
            "a slab beyond the arena",
            within="kv_quantise_keys_kernel",
        ),
        Mutant(
            "one slab for two",
            "slab = slabs_at(targets_ptr, row // 32, num_slabs, GRAIN)",
            "slab = slabs_at(targets_ptr, 0, num_slabs, GRAIN)",
            DoubleStore,
            "store of slabs",
        ),
        Mutant(
            "sources of another block",
            "sources_ptr += block * (FROM_BITS // 4)",
            "sources_ptr += block",
            DIFFERS,
            within="kv_quantise_keys_kernel",
        ),
        Mutant(
            "sources past the last",
            "sources_ptr += block * (FROM_BITS // 4)",
            "sources_ptr += 4 + block * (FROM_BITS // 4)",
            OutOfBounds,
            "load of sources",
            within="kv_quantise_keys_kernel",
        ),
        Mutant(
            "all blocks in one place",
            "    targets_ptr += block * (BITS // 4)\n",
            "",
            DoubleStore,
            "store of",
            within="kv_quantise_keys_kernel",
        ),
        Mutant(
            "heads that are one",
            "slabs_at(targets_ptr, 0, num_slabs, 1) * num_heads + head",
            "slabs_at(targets_ptr, 0, num_slabs, 1) * num_heads",
            DoubleStore,
            "store of slabs",
        ),
        Mutant(
            "a target that is a source",
            "tl.store(target_meta, kept)",
            "tl.store(sources_ptr + column, kept.to(tl.int32))",
            StoredInput,
            "store into sources",
        ),
        Mutant(
            "targets for sources",
            "grid, slabs, meta, sources, targets, len(meta)",
            "grid, slabs, meta, targets, sources, len(meta)",
            OutOfBounds,
            file="api",
        ),
        Mutant(
            "heads for slabs",
            "targets, len(meta), num_heads,",
            "targets, num_heads, len(meta),",
            ContractError,
            file="api",
        ),
        Mutant(
            "a slab of another arena",
            "slabs_at(sources_ptr, 0, num_slabs, 1)",
            "slabs_at(sources_ptr, 0, 1, 1)",
            DeviceAssertion,
            "a slab beyond the arena",
        ),
    ],
    VALUES: [
        Mutant(
            "bytes in their places",
            "byte, lane = place_of_byte(token % 4), token % 16 // 4",
            "byte, lane = token % 4, token % 16 // 4",
            DIFFERS,
        ),
        Mutant(
            "one half's least",
            "least = tl.minimum(tl.min(low, 0, keep_dims=True), tl.min(high, 0, keep_dims=True))",
            "least = tl.min(low, 0, keep_dims=True)",
            DIFFERS,
        ),
        Mutant(
            "swapped nibbles",
            "tl.store(stored, low | high << 4)",
            "tl.store(stored, high | low << 4)",
            DIFFERS,
        ),
        Mutant(
            "rows in order",
            "rows = channel // 16 * 8 + channel % 8",
            "rows = channel // 16 * 8 + channel // 2 % 8",
            DoubleStore,
            "store of slabs",
        ),
        Mutant(
            "a lane's own in order",
            "token // 16 % SIXTEENS * 4 + token % 4",
            "token // 16 % SIXTEENS * 4 + 3 - token % 4",
            DIFFERS,
        ),
        Mutant(
            "zeros for scales",
            "tl.store(stored_meta + 64, kept_zero)",
            "tl.store(stored_meta + 64, kept)",
            DIFFERS,
        ),
        Mutant(
            "stale metadata",
            "tl.store(stored_meta + 96, tl.zeros(kept.shape, tl.float16))",
            "pass",
            DIFFERS,
        ),
        Mutant(
            "metadata past the last",
            "(slab // GRAIN * num_heads + head) * 128",
            "(slab // GRAIN * num_heads + head) * 256",
            OutOfBounds,
            "store of meta",
        ),
        Mutant(
            "slots by slabs",
            "(slab // GRAIN * num_heads + head) * 128",
            "(slab * num_heads + head) * 128",
            OutOfBounds,
            "store of meta",
        ),
        Mutant(
            "a slot of one slab's tokens",
            "SIXTEENS: tl.constexpr = 16 // BITS * GRAIN",
            "SIXTEENS: tl.constexpr = 16 // BITS",
            DoubleStore,
            "store of meta",
        ),
        Mutant(
            "nothing where there are tokens",
            "if BITS == 8 and GRAIN == 1:",
            "if BITS == 8:",
            DoubleStore,
            "store of meta",
        ),
        Mutant(
            "one half twice",
            "token, 1, FROM_BITS, GRAIN, SIZE)",
            "token, 0, FROM_BITS, GRAIN, SIZE)",
            DIFFERS,
        ),
    ],
}
