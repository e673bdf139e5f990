"""Where the slabs of a tiered cache lie, and what they take."""

import pytest
import torch

from engine.cache.kv_arenas import KvArenas, LayerGroup
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from engine.execution.tiered_kv import TieredKV, formats_of

CPU = torch.device("cpu")
GROUPS = (
    TierGroup(TierConfig(cold_format="k8v4"), (0, 2), 10, 7),
    TierGroup(TierConfig(cold_format="int4"), (1,), 3, 4),
)


@pytest.fixture
def kv() -> TieredKV:
    return TieredKV.allocate(GROUPS, 2, 16, CPU)


def test_each_layer_has_the_slabs_of_its_group(kv: TieredKV) -> None:
    assert kv.group_of == (0, 1, 0)
    first, second, third = kv.layers
    assert [len(each) for each in first] == [len(each) for each in third] == [10, 7, 5, 7]
    assert [len(each) for each in second] == [3, 4, 3, 4]
    assert first.keys.shape[1:] == first.values.shape[1:] == (2, 32 * 16)
    assert first.key_meta.shape[1:] == (2, 2, 16)
    assert first.value_meta.shape[1:] == (2, 2, 64)


def test_all_layers_of_a_group_are_one_arena(kv: TieredKV) -> None:
    third = kv.layers[2]
    third.keys[4], third.values[3], third.key_meta[2], third.value_meta[3] = 1, 2, 3.0, 4.0

    found = [each.flatten(1).any(1).nonzero().flatten().tolist() for each in kv.whole[0]]

    assert found == [[10 + 4], [7 + 3], [5 + 2], [7 + 3]]
    assert all(tensor.is_contiguous() for each in kv.layers for tensor in each)
    assert not any(each.any() for slabs in (kv.layers[0], kv.layers[1]) for each in slabs)


def test_the_bytes_are_those_that_the_arenas_count(kv: TieredKV) -> None:
    counted = 0
    for group in GROUPS:
        arenas = KvArenas.create(group.num_key_slabs, group.num_value_slabs, group.config)
        counted += arenas.num_bytes(LayerGroup(group.num_layers, 2, 16), group.config)
    assert kv.num_bytes == counted


@pytest.mark.parametrize(
    ("cold_format", "formats"), [("int4", (4, 4)), ("k8v4", (8, 4)), ("int8", (8, 8))]
)
def test_formats_as_the_kernels_count_them(cold_format: str, formats: tuple[int, int]) -> None:
    assert formats_of(TierConfig(cold_format=cold_format)) == formats
