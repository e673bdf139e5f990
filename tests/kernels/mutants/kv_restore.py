"""Mutants of kv_restore: of keys and of values."""

from functools import partial

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    StoredInput,
)
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.restored_blocks import FORMS, RESTORES, stored


def op(kind: str) -> Op:
    return Op(
        "kv_restore",
        f"restore_{kind}",
        RESTORES[kind][1],
        {
            f"{bits} bits, grains of {grain}": partial(stored, kind, bits, grain, 64)
            for bits, grain in FORMS
        },
    )


KEYS, VALUES = op("keys"), op("values")
KEY_KERNEL, VALUE_KERNEL = "kv_restore_keys_kernel", "kv_restore_values_kernel"
MUTANTS = {
    KEYS: [
        Mutant("zeros for scales", "tl.load(place + SIZE)", "tl.load(place)", DIFFERS),
        Mutant(
            "swapped scales and zeros",
            "scale, zero = affine_of_keys(",
            "zero, scale = affine_of_keys(",
            DIFFERS,
        ),
        Mutant(
            "metadata of the other half",
            "meta_ptr + half * HALF",
            "meta_ptr + (1 - half) * HALF",
            DIFFERS,
        ),
        Mutant(
            "metadata in the order of lanes",
            "scale = tl.load(place).reshape(4, HALF // 16, 4).permute(1, 0, 2).reshape(HALF)",
            "scale = tl.load(place)",
            DIFFERS,
        ),
        Mutant(
            "high nibbles like low ones",
            "FACTOR: tl.constexpr = 16 if BITS + half == 5 else 1",
            "FACTOR: tl.constexpr = 1",
            DIFFERS,
        ),
        Mutant(
            "one half twice",
            "words = words_at(slabs_ptr, parts, 1, BITS, SIZE)",
            "words = words_at(slabs_ptr, parts, 0, BITS, SIZE)",
            DIFFERS,
            within=KEY_KERNEL,
        ),
        Mutant("nibbles of one half", "(4 * half if BITS == 4 else 0)", "0", DIFFERS),
        Mutant(
            "bytes in their places",
            "8 * place_of_byte(tl.arange(0, 4))",
            "8 * tl.arange(0, 4)",
            DIFFERS,
        ),
        Mutant(
            "tokens in the order of accumulators",
            "permute(0, 2, 3, 1, 4, 6, 5)",
            "permute(0, 1, 2, 3, 4, 6, 5)",
            DIFFERS,
        ),
        Mutant(
            "channels in the order of lanes",
            "permute(0, 2, 3, 1, 4, 6, 5)",
            "permute(0, 2, 3, 1, 4, 5, 6)",
            DIFFERS,
        ),
        Mutant(
            "own channels as own tokens",
            "(fours[:, :, None] >> shifts_of(half, BITS)[None, None, :])",
            "(fours[:, None, :] >> shifts_of(half, BITS)[None, :, None])",
            DIFFERS,
        ),
        Mutant(
            "the bias of another format",
            "BIAS: tl.constexpr = 2 ** (BITS - 1)",
            "BIAS: tl.constexpr = 128",
            DIFFERS,
        ),
        Mutant(
            "zeros that are not scaled",
            "(codes - BIAS + zero) * scale",
            "(codes - BIAS) * scale + zero",
            DIFFERS,
        ),
        Mutant(
            "a slab too far",
            "slabs_at(sources_ptr, nth, num_slabs, GRAIN)",
            "slabs_at(sources_ptr, nth + 1, num_slabs, GRAIN)",
            OutOfBounds,
            "load of sources",
            within=KEY_KERNEL,
        ),
        Mutant(
            "slots by slabs",
            "slabs_at(sources_ptr, 0, num_slabs, GRAIN) // GRAIN",
            "slabs_at(sources_ptr, 0, num_slabs, GRAIN)",
            DIFFERS,
        ),
        Mutant(
            "slots where slabs are counted",
            "num_slabs = num_slots * GRAIN",
            "num_slabs = num_slots",
            DeviceAssertion,
            "a slab beyond the arena",
            within=KEY_KERNEL,
        ),
        Mutant(
            "sources of another block",
            "sources_ptr += block * (BITS // 4)",
            "sources_ptr += block",
            DIFFERS,
            within=KEY_KERNEL,
        ),
        Mutant(
            "pages of another stride",
            "page.to(tl.int64) * 64",
            "page.to(tl.int64) * 32",
            DoubleStore,
            "store of pages",
        ),
        Mutant(
            "rows of another stride",
            "(token * num_heads + head) * SIZE",
            "(token + head) * SIZE",
            DoubleStore,
            "store of pages",
        ),
        Mutant(
            "pages past the last",
            "(token * num_heads + head) * SIZE",
            "(token * num_heads + head) * (2 * SIZE)",
            OutOfBounds,
            "store of pages",
        ),
        Mutant(
            "pages in the order of blocks", "tl.load(targets_ptr + block)", "block + 0", DIFFERS
        ),
        Mutant(
            "heads that are one",
            "tl.program_id(0) // num_heads, tl.program_id(0) % num_heads",
            "tl.program_id(0) // num_heads, tl.program_id(0) % 1",
            DoubleStore,
            "store of pages",
            within=KEY_KERNEL,
        ),
        Mutant("tokens of another slab", "token // 16", "token // 32", DIFFERS),
        Mutant("tokens of another place", "token % 16", "token % 8", DIFFERS),
        Mutant(
            "a block that is written",
            "tl.store(rows_ptr + channel, tokens.to(rows_ptr.dtype.element_ty))",
            "tl.store(tokens_ptr + place[:, None] + channel, tokens)",
            StoredInput,
            "store into slabs",
        ),
        Mutant(
            "blocks without a program",
            "(len(sources) * num_heads,)",
            "(num_heads,)",
            DIFFERS,
            file="api",
        ),
        Mutant(
            "slabs for slots",
            "sizes = len(meta), num_pages",
            "sizes = num_pages, len(meta)",
            ContractError,
            file="api",
        ),
    ],
    VALUES: [
        Mutant("zeros of another token", "tl.load(place + 64)", "tl.load(place + 32)", DIFFERS),
        Mutant(
            "metadata in the order of lanes",
            "scale = tl.load(place).reshape(SLOTS, 4, 4 // SLOTS, 4).permute(0, 2, 1, 3)",
            "scale = tl.load(place)",
            DIFFERS,
        ),
        Mutant(
            "metadata of another head", "slots * num_heads + head", "slots * num_heads", DIFFERS
        ),
        Mutant(
            "slots by slabs",
            "slabs_at(sources_ptr, first, num_slabs, GRAIN) // GRAIN",
            "slabs_at(sources_ptr, first, num_slabs, GRAIN)",
            DIFFERS,
        ),
        Mutant(
            "a slot of one slab's tokens",
            "SLOTS: tl.constexpr = BITS // 4 // GRAIN",
            "SLOTS: tl.constexpr = BITS // 4",
            OutOfBounds,
            "load of sources",
        ),
        Mutant("tokens in the order of lanes", "permute(2, 1, 0)", "permute(1, 2, 0)", DIFFERS),
        Mutant(
            "channels in the order of rows",
            "permute(0, 5, 3, 1, 4, 2)",
            "permute(0, 5, 3, 1, 2, 4)",
            DIFFERS,
        ),
        Mutant(
            "own tokens as own channels",
            "(fours[:, None, :] >> shifts_of(half, BITS)[None, :, None])",
            "(fours[:, :, None] >> shifts_of(half, BITS)[None, None, :])",
            DIFFERS,
        ),
        Mutant(
            "both nibbles",
            "MASK: tl.constexpr = 2**BITS - 1",
            "MASK: tl.constexpr = 255",
            DIFFERS,
            within="values_of",
        ),
        Mutant("words of one half", "(WORDS * half if BITS == 8 else 0)", "0", DIFFERS),
        Mutant(
            "slabs past the last",
            "parts[:, None] * (8 * SIZE)",
            "parts[:, None] * (16 * SIZE)",
            OutOfBounds,
            "load of slabs",
        ),
        Mutant("a half over the other", "rows_ptr + half * HALF", "rows_ptr + 0 * HALF", DIFFERS),
        Mutant(
            "the second half for the first",
            "words_at(slabs_ptr, parts, 0, BITS, SIZE)",
            "words_at(slabs_ptr, parts, 1, BITS, SIZE)",
            DIFFERS,
            within=VALUE_KERNEL,
        ),
    ],
}
