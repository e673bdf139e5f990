"""Blocks in fewer bits: exactly the reference's bytes, for sizes, formats and large values."""

import pytest

from kernels.kv_quantise import reference
from kernels.kv_quantise.layout import slabs_of_block
from tests.kernels.gpu.compare import assert_gpu_equals_reference
from tests.kernels.quantised_blocks import FORMS, KINDS, arena

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", reference.SIZES)
@pytest.mark.parametrize(("from_bits", "bits", "grain"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_reference(kind: str, from_bits: int, bits: int, grain: int, size: int) -> None:
    op, expected = KINDS[kind]
    slabs, meta, sources, others = arena(kind, from_bits, size, num_blocks=40, grain=grain)
    width = slabs_of_block(bits)
    targets = others[: 40 * width].view(40, width)
    assert_gpu_equals_reference(op, expected, slabs, meta, sources, targets, from_bits, bits)
