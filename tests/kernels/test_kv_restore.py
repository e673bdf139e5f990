"""Blocks become pages: exactly the reference's, which are what codes stand for, rounded once."""

import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError, DeviceAssertion, DoubleStore
from kernels.kv_quantise.reference import SIZES
from tests.kernels.launches import assert_bundled
from tests.kernels.quantised_blocks import CODECS, tokens
from tests.kernels.restored_blocks import FORMS, RESTORES, stored


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("bits", "grain"), FORMS)
@pytest.mark.parametrize("kind", RESTORES)
def test_the_kernel_equals_its_reference(
    kind: str, bits: int, grain: int, size: int, dtype: torch.dtype
) -> None:
    """Exactly: a difference, a sum and a product in float32 are rounded alike on both sides."""
    assert_equals_reference(*RESTORES[kind], *stored(kind, bits, grain, size, dtype))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize(("bits", "grain"), [(4, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("kind", RESTORES)
def test_a_page_is_what_its_block_stands_for(
    kind: str, bits: int, grain: int, dtype: torch.dtype, error: float
) -> None:
    """A sum of float32, next to nothing, may be off by what is left of a code's last place."""
    quantised, dequantised, _ = CODECS[kind]
    packed = quantised(tokens(2, 2, 64), bits, grain)
    exact = dequantised(packed, bits).transpose(1, 2)
    arguments = stored(kind, bits, grain, 64, dtype)
    RESTORES[kind][1](*arguments)
    pages, targets = arguments[3:5]
    restored = pages[targets.long()].double()
    scale = exact.abs().amax((1, 2, 3), keepdim=True)
    assert ((restored - exact).abs() <= error * exact.abs() + 2**-22 * scale).all()


@pytest.mark.parametrize("kind", RESTORES)
def test_tokens_are_copied_whatever_their_bits(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = stored(kind, 16, 1, 64)
    slabs.random_(generator=torch.Generator().manual_seed(3))
    with checked():
        RESTORES[kind][0](slabs, meta, sources, pages, targets, bits)
    tokens_of_blocks = slabs[sources.long()].view(torch.int16).view(2, 64, 2, 64)
    assert torch.equal(pages[targets.long()].view(torch.int16), tokens_of_blocks)


@pytest.mark.parametrize("kind", RESTORES)
def test_tables_of_any_kind_and_place(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = stored(kind, 8, 2, 64, num_blocks=7)
    for dtype in (torch.int32, torch.int64):
        tables = sources[1:6], pages, targets.to(dtype)[1:6]
        assert_equals_reference(*RESTORES[kind], slabs, meta, *tables, bits)


@pytest.mark.parametrize("kind", RESTORES)
def test_no_blocks(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = stored(kind, 8, 1, 64)
    assert_equals_reference(*RESTORES[kind], slabs, meta, sources[:0], pages, targets[:0], bits)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("kind", RESTORES)
def test_what_is_nowhere_is_noticed(kind: str, bits: int) -> None:
    slabs, meta, sources, pages, targets, _ = stored(kind, bits, 1, 64)
    for wrong in (-1, len(slabs)):
        table = sources.clone()
        table[1, -1] = wrong
        with checked(), pytest.raises(DeviceAssertion, match="a slab beyond the arena"):
            RESTORES[kind][0](slabs, meta, table, pages, targets, bits)
    for wrong in (-1, len(pages)):
        table = targets.clone()
        table[1] = wrong
        with checked(), pytest.raises(DeviceAssertion, match="a page beyond the last"):
            RESTORES[kind][0](slabs, meta, sources, pages, table, bits)


@pytest.mark.parametrize("kind", RESTORES)
def test_a_page_for_two_blocks_is_noticed(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = stored(kind, 4, 1, 64)
    targets[1] = targets[0]
    with checked(), pytest.raises(DoubleStore, match="store of pages"):
        RESTORES[kind][0](slabs, meta, sources, pages, targets, bits)


@pytest.mark.parametrize("kind", RESTORES)
def test_a_slab_out_of_its_place_in_a_grain_is_noticed(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = stored(kind, 8, 2, 64)
    with checked(), pytest.raises(DeviceAssertion, match="out of its place in a grain"):
        RESTORES[kind][0](slabs, meta, sources.flip(1), pages, targets, bits)


@pytest.mark.parametrize("kind", RESTORES)
def test_what_no_kernel_restores_is_refused(kind: str) -> None:
    slabs, meta, sources, pages, targets, _ = stored(kind, 4, 1, 64)
    restore, name = RESTORES[kind][0], f"kv_restore_{kind}"
    wide = torch.zeros(5, 64, 2, 96).bfloat16()
    for arguments, expected in (
        (
            (slabs, meta, sources, wide, targets),
            "pages must be of heads of 64 or 128 or 256, came 96",
        ),
        ((slabs, meta[::2], sources, pages, targets), "meta must be of 24 slots, for 24 slabs"),
        ((slabs, meta, sources, pages[:, :32], targets), "pages must be"),
        ((slabs, meta, sources, pages.half(), targets), "pages must be bfloat16 or float32"),
        ((slabs, meta, sources.long(), pages, targets), "sources must be int32, came int64"),
        ((slabs, meta, sources, pages, targets[:1]), "targets must be"),
        ((slabs[..., :1024], meta, sources, pages, targets), "must be"),
    ):
        with checked(), pytest.raises(ContractError, match=f"{name}: .*{expected}"):
            restore(*arguments, 4)


@pytest.mark.parametrize("kind", RESTORES)
def test_every_launch_of_a_served_model_has_its_variant(kind: str) -> None:
    bits, grain = (8, 2) if kind == "keys" else (4, 1)
    for each in (bits, 16):
        arguments = stored(kind, each, grain, 128)
        assert_bundled(lambda arguments=arguments: RESTORES[kind][0](*arguments))
