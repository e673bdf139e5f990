"""Blocks in fewer bits: the codec, and the kernels that are exactly it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError, DeviceAssertion
from kernels.kv_quantise import layout, reference
from kernels.kv_quantise.api import quantise_keys
from kernels.kv_quantise.layout import BIAS, LEVELS, SLAB_TOKENS, slabs_of_block
from tests.kernels.launches import assert_bundled
from tests.kernels.quantised_blocks import CODECS, FORMS, KINDS, arena, tokens

EXPONENTS = st.integers(-14, 18)


@pytest.mark.parametrize("size", reference.SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_packed_comes_back(bits: int, size: int) -> None:
    shape = (3, SLAB_TOKENS[bits], size)
    codes = torch.randint(LEVELS[bits] + 1, shape, dtype=torch.uint8)
    for pack, unpack in (
        (layout.pack_keys, layout.unpack_keys),
        (layout.pack_values, layout.unpack_values),
    ):
        packed = pack(codes, bits)
        assert packed.shape == (3, layout.part_bytes(size))
        assert torch.equal(unpack(packed, bits), codes)
    scales = torch.randn(3, size)
    assert torch.equal(layout.unpack_key_meta(layout.pack_key_meta(scales)), scales)
    scales = torch.randn(3, SLAB_TOKENS[bits])
    assert torch.equal(layout.unpack_value_meta(layout.pack_value_meta(scales)), scales)


@pytest.mark.parametrize("size", reference.SIZES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_where_each_code_lies(kind: str, bits: int, size: int) -> None:
    """As the layout's docstring says it, byte by byte."""
    half, num_tokens = size // 2, SLAB_TOKENS[bits]
    codes = torch.randint(LEVELS[bits] + 1, (num_tokens, size), dtype=torch.uint8)
    packed = (layout.pack_keys if kind == "keys" else layout.pack_values)(codes, bits)
    place = torch.arange(32 * size)
    own = torch.tensor([0, 2, 1, 3])[place % 4]
    is_high = torch.zeros_like(place) if bits == 4 else place // (16 * size)
    place = place // 4 % (4 * size if bits == 8 else 8 * size)
    if kind == "keys":
        lane, sixteen = place // (half // 16) % 4, place % (half // 16)
        channel, row = 16 * sixteen + 4 * lane + own, place // (half // 4)
        # Columns of an accumulator: 32s of tokens, pair, 16s, lane, of the pair.
        pair, of_16s, column, of_pair = row // 16 % 2, row // 8 % 2, row // 2 % 4, row % 2
        token = row // 32 * 32 + 16 * of_16s + 4 * column + 2 * pair + of_pair
    elif bits == 4:
        channel, token = place // 16, 16 * (place % 4) + 4 * (place // 4 % 4) + own
    else:
        # Of 16 channels a lane has rows 0 to 7 of an operand, and those 8 further on.
        of_16s, row, lane, further, sixteen = (
            each.flatten()
            for each in torch.meshgrid(*map(torch.arange, (half // 16, 8, 4, 2, 2)), indexing="ij")
        )
        channel, token = (
            (16 * of_16s + 8 * further + row)[place],
            (16 * sixteen + 4 * lane)[place],
        )
        token = token + own
    expected = codes[token, channel + half * is_high]
    if bits == 4:
        expected = expected | codes[token, channel + half] << 4
    assert torch.equal(packed, expected)


def test_a_lane_owns_the_bytes_that_lie_side_by_side() -> None:
    """Sixteen bytes of a row are the lane's four channels of each 16, the middle ones swapped."""
    channels = torch.arange(128, dtype=torch.uint8).expand(32, 128)
    rows = layout.pack_keys(channels, 8).view(2, 32, 4, 16)
    expected = [16 * part + 4 + place for part in range(4) for place in (0, 2, 1, 3)]
    assert rows[0, 5, 1].tolist() == expected
    assert rows[1, 5, 1].tolist() == [64 + each for each in expected]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["keys", "values"]),
    st.sampled_from([4, 8]),
    st.lists(st.tuples(st.floats(-1, 1, width=16), EXPONENTS), min_size=1, max_size=12),
    st.integers(0, 10**6),
)
@example("keys", 8, [(0.0, 0), (0.000141143798828125, 2)], 0)
def test_errors_are_half_a_step(kind, bits, numbers, seed) -> None:
    """Or a quarter more at the ends, where a zero far from the codes is rounded; and what float16
    does not tell of a scale below 2^-14, once for each code: 8e-6 at most."""
    quantised, dequantised, dim = CODECS[kind]
    pool = torch.tensor([mantissa * 2.0**exponent for mantissa, exponent in numbers])
    chosen = torch.randint(len(pool), (64, 64), generator=torch.Generator().manual_seed(seed))
    exact = pool[chosen].bfloat16()
    packed = quantised(exact, bits)
    error = (dequantised(packed, bits) - exact.double()).abs()

    least, greatest = exact.double().amin(dim, True), exact.double().amax(dim, True)
    magnitude = torch.maximum(-least, greatest)
    step = torch.maximum((greatest - least) / LEVELS[bits], magnitude / reference.MAX_ZERO)
    step = step.clamp(reference.MIN_SCALE, None)
    rounding = 2.0**-25 * layout.high_nibble_factors(64, bits).max().item()
    assert (error <= 0.76 * step * (1 + 2**-6) + LEVELS[bits] * rounding).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_of_two_slabs_holds_what_their_own_would(kind: str) -> None:
    quantised, dequantised, _ = CODECS[kind]
    exact = tokens(2, 3, 64)
    own, shared = quantised(exact, 8), quantised(exact, 8, 2)
    assert [each.meta.shape[2] for each in (own, shared)] == [2, 1]
    assert torch.equal(own.bytes, shared.bytes)
    assert torch.equal(dequantised(own, 8), dequantised(shared, 8))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["keys", "values"]), st.sampled_from([4, 8]), st.integers(0, 10**6))
def test_what_codes_stand_for_is_quantised_to_the_same_codes(kind, bits, seed) -> None:
    quantised, dequantised, dim = CODECS[kind]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(LEVELS[bits] + 1, (64, 64), generator=generator)
    codes.select(dim, 0).fill_(0)
    codes.select(dim, 1).fill_(LEVELS[bits])
    exact = (codes.double() - BIAS[bits]) / 4
    assert torch.equal(dequantised(quantised(exact, bits), bits), exact)


@pytest.mark.parametrize("size", reference.SIZES)
@pytest.mark.parametrize(("from_bits", "bits", "grain"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_equals_its_reference(
    kind: str, from_bits: int, bits: int, grain: int, size: int
) -> None:
    op, expected = KINDS[kind]
    slabs, meta, sources, others = arena(kind, from_bits, size, grain=grain)
    width = slabs_of_block(bits)
    targets = others[: 2 * width].view(2, width)
    assert_equals_reference(op, expected, slabs, meta, sources, targets, from_bits, bits)


def test_no_blocks() -> None:
    slabs, meta, *_ = arena("keys", 16, 64)
    none = torch.zeros(0, 4, dtype=torch.int32)
    assert_equals_reference(
        quantise_keys, reference.quantise_keys, slabs, meta, none, none[:, :1], 16, 4
    )


@pytest.mark.parametrize("slab", [-1, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_beyond_the_arena_is_noticed(kind: str, slab: int) -> None:
    slabs, meta, sources, others = arena(kind, 16, 64)
    targets = others[:2].view(2, 1).clone()
    for table in (sources, targets):
        kept = table.clone()
        table[1, 0] = slab
        with checked(), pytest.raises(DeviceAssertion, match="a slab beyond the arena"):
            KINDS[kind][0](slabs, meta, sources, targets, 16, 4)
        table.copy_(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slab_out_of_its_place_in_a_grain_is_noticed(kind: str) -> None:
    slabs, meta, sources, others = arena(kind, 16, 64, grain=2)
    targets = others[:4].view(2, 2)
    for tables in ((sources, targets.flip(1)), (sources.flip(1), targets)):
        with checked(), pytest.raises(DeviceAssertion, match="out of its place in a grain"):
            KINDS[kind][0](slabs, meta, *tables, 16, 8)


@pytest.mark.parametrize(
    ("num_slots", "bits", "expected"),
    [
        (12, 4, "of 24 slots, for 24 slabs and blocks of 4 bits, came 12"),
        (8, 8, "of 24 or 12 slots, for 24 slabs and blocks of 8 bits, came 8"),
        (11, 8, "of 24 or 12 slots, for 24 slabs and blocks of 8 bits, came 11"),
        (25, 4, "of 24 slots, for 24 slabs and blocks of 4 bits, came 25"),
        (0, 8, "of 24 or 12 slots, for 24 slabs and blocks of 8 bits, came 0"),
    ],
)
def test_slots_that_are_none_of_those_slabs_are_refused(
    num_slots: int, bits: int, expected: str
) -> None:
    slabs, meta, sources, others = arena("keys", 16, 64)
    meta = torch.cat((meta, meta))[:num_slots]
    targets = others[: 2 * slabs_of_block(bits)].view(2, -1)
    with checked(), pytest.raises(ContractError, match=f"meta must be {expected}"):
        quantise_keys(slabs, meta, sources, targets, 16, bits)


def test_what_no_kernel_writes_is_refused() -> None:
    slabs, meta, sources, others = arena("keys", 16, 64)
    targets = others[:2].view(2, 1)
    wide = torch.zeros(24, 2, 32 * 96, dtype=torch.uint8)
    with checked(), pytest.raises(ContractError, match="of heads of 64 or 128 or 256, came 96"):
        quantise_keys(wide, meta, sources, targets, 16, 4)
    with checked(), pytest.raises(ContractError, match="sources must be int32, came int64"):
        quantise_keys(slabs, meta, sources.long(), targets, 16, 4)
    with checked(), pytest.raises(AssertionError, match="8, 8"):
        quantise_keys(slabs, meta, sources, targets, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_launch_of_a_served_model_has_its_variant(kind: str) -> None:
    op: Callable[..., None] = KINDS[kind][0]
    for from_bits, bits, grain in FORMS[3:] if kind == "keys" else FORMS[:3]:
        slabs, meta, sources, others = arena(kind, from_bits, 128, grain=grain)
        width = slabs_of_block(bits)
        targets = others[: 2 * width].view(2, width)
        arguments = (slabs, meta, sources, targets, from_bits, bits)
        assert_bundled(lambda arguments=arguments: op(*arguments))
