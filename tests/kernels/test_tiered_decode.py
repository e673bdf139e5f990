import pytest
import torch

from kernels.checked_interpreter import checked
from kernels.errors import ContractError, DeviceAssertion
from kernels.tiered_decode import reference
from kernels.tiered_decode.api import num_runs_of, tiered_decode
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import FORMATS, SERVED_FORMATS, Formats
from tests.kernels.launches import assert_bundled
from tests.kernels.slab_caches import Cache, bounds_of, slab_cache, tokens_of

# Of results of about 1: a weight and a scaled query are rounded to float16.
ATOL = 2e-3
MAX_ERROR = 1e-3
INT4 = FORMATS[0]


@pytest.fixture(autouse=True)
def _scratch_is_poisoned():
    """What a run did not store is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def attended(
    query: torch.Tensor, cache: Cache, formats: Formats, num_runs: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    with checked():
        plan = tiered_plan(cache.bounds, num_runs, formats)
        tables = cache.key_tables, cache.value_tables
        return tiered_decode(query, cache.slabs, *tables, plan, formats, scale, torch.float32)


def assert_right(
    query: torch.Tensor, cache: Cache, formats: Formats, num_runs: int = 3, scale: float = 0.125
) -> None:
    out, lse = attended(query, cache, formats, num_runs, scale)
    tables = cache.key_tables, cache.value_tables, cache.bounds
    expected, expected_lse = reference.tiered_decode(query, cache.slabs, *tables, formats, scale)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=ATOL)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=2e-3)
    assert (out - expected).norm() <= MAX_ERROR * expected.norm()


def queries_of(num_sequences: int, query_len: int, num_heads: int, size: int = 64) -> torch.Tensor:
    queries = tokens_of(query_len, num_sequences, num_heads * size, seed=9)
    return queries.view(num_sequences, query_len, num_heads, size)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("size", reference.SIZES)
def test_tiers_of_unequal_lengths(size: int, formats: Formats) -> None:
    cache = slab_cache(bounds_of([600, 0, 1, 130], warm=192), 2, size, formats)
    for num_runs in (1, 4):
        assert_right(tokens_of(4, 4, size, seed=9).transpose(0, 1), cache, formats, num_runs)


@pytest.mark.parametrize(
    ("formats", "grains"),
    [((8, 4), (1, 1)), ((8, 8), (1, 1)), ((8, 8), (1, 2)), ((8, 8), (2, 1))],
)
def test_grains_are_those_of_the_arenas(formats: tuple[int, int], grains: tuple[int, int]) -> None:
    """Whatever the formats of the run; the others are those of a cold tier's own arenas."""
    for size in (64, 256):
        bounds = bounds_of([460, 130], warm=128)
        cache = slab_cache(bounds, 2, size, Formats(*formats), grains=grains)
        assert_right(tokens_of(2, 4, size, seed=9).transpose(0, 1), cache, Formats(*formats))


@pytest.mark.parametrize(("formats", "atol"), list(zip(FORMATS, (1e-9, 0.02, 0.02), strict=True)))
def test_the_reference_is_attention_by_hand(formats: Formats, atol: float) -> None:
    """Of keys and values that codes of 4 bits hold exactly."""
    codes = torch.randint(0, 16, (2, 1, 300, 64), generator=torch.Generator().manual_seed(1))
    codes[:, :, ::64], codes[:, :, 1::64] = 0, 15
    codes[..., 0], codes[..., 1] = 0, 15
    keys, values = (codes / 4 - 2).bfloat16()
    cache = slab_cache(bounds_of([300], warm=0), 1, 64, formats, [keys], [values])
    query = tokens_of(2, 1, 64, seed=3)
    tables = cache.key_tables, cache.value_tables, cache.bounds
    out, lse = reference.tiered_decode(query, cache.slabs, *tables, formats, 0.3)

    scores = 0.3 * query[0].double() @ keys[0].double().T
    expected = scores.softmax(-1) @ values[0].double()
    torch.testing.assert_close(out[0], expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse[0], scores.logsumexp(-1), rtol=0, atol=atol)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (8, 1), (9, 1), (32, 2)])
def test_groups_of_heads(num_heads: int, num_kv_heads: int) -> None:
    cache = slab_cache(bounds_of([300], warm=64), num_kv_heads, 64, INT4)
    assert_right(tokens_of(1, num_heads, 64, seed=9).transpose(0, 1), cache, INT4)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("query_len", [2, 3, 4])
def test_a_query_sees_its_own_token_and_those_before_it(query_len: int, formats: Formats) -> None:
    """Also where it has none, where later ones are in another slab, and where they are in the sink,
    for there are few others."""
    bounds = bounds_of([460, 0, 1, 2, 3, 17, 209], warm=128).tolist()
    bounds += [[64, 64, 64, 64], [64, 64, 64, 66], [64, 64, 128, 131]]
    cache = slab_cache(torch.tensor(bounds).int(), 1, 64, formats)
    query = queries_of(len(bounds), query_len, 3)
    for num_runs in (1, 60):
        assert_right(query, cache, formats, num_runs)


@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
def test_the_reference_of_many_queries_is_that_of_one_in_contexts_that_end_there(
    query_len: int,
) -> None:
    cache = slab_cache(bounds_of([460, 0, 1, 2, 3, 66], warm=128), 2, 64, INT4)
    query = queries_of(6, query_len, 4)
    tables = cache.key_tables, cache.value_tables
    out, lse = reference.tiered_decode(query, cache.slabs, *tables, cache.bounds, INT4, 0.3)
    for nth in range(query_len):
        ends = cache.bounds.clone()
        ends[:, 3] = (ends[:, 3] - query_len + 1 + nth).clamp(0)
        of_one = reference.tiered_decode(query[:, nth], cache.slabs, *tables, ends, INT4, 0.3)
        torch.testing.assert_close((out[:, nth], lse[:, nth]), of_one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("query_len", [2, 4])
@pytest.mark.parametrize("formats", FORMATS)
def test_as_few_hot_tokens_as_can_be(formats: Formats, query_len: int) -> None:
    """The first query then sees none of them."""
    hot = query_len - 1
    bounds = torch.tensor([[0, 64, 192, 192 + hot], [64, 192, 256, 256 + hot]]).int()
    cache = slab_cache(bounds, 1, 64, formats)
    query = queries_of(2, query_len, 2)
    for num_runs in (1, 4, 40):
        assert_right(query, cache, formats, num_runs)
    fewer = cache._replace(bounds=bounds - torch.tensor([0, 0, 0, 1]).int())
    with pytest.raises(DeviceAssertion, match="tokens to hide in a quantised tier"):
        attended(query, fewer, formats, 3, 1.0)


@pytest.mark.parametrize(
    ("group", "query_len"),
    [(1, 4), (2, 4), (3, 4), (4, 2), (4, 3), (4, 4), (5, 3), (8, 2), (16, 1)],
)
@pytest.mark.parametrize("size", [64, 256])
def test_queries_of_groups_of_heads(size: int, group: int, query_len: int) -> None:
    """Of wide heads more than 8 queries are two programs."""
    cache = slab_cache(bounds_of([300, 67], warm=64), 2, size, INT4)
    assert_right(queries_of(2, query_len, 2 * group, size), cache, INT4)


def test_one_query_of_either_shape() -> None:
    cache = slab_cache(bounds_of([300, 0], warm=64), 2, 64, INT4)
    query = queries_of(2, 1, 8)
    out, lse = attended(query, cache, INT4, 3, 0.3)
    assert (out.shape, lse.shape) == ((2, 1, 8, 64), (2, 1, 8))
    of_three = attended(query[:, 0], cache, INT4, 3, 0.3)
    assert torch.equal(out[:, 0], of_three[0])
    assert torch.equal(lse[:, 0], of_three[1])


def test_part_of_a_projection() -> None:
    cache = slab_cache(bounds_of([200, 70]), 2, 64, INT4)
    query = tokens_of(2, 9, 64, seed=9).transpose(0, 1)[:, 3:7]
    assert_right(query, cache, INT4)
    assert_right(queries_of(2, 3, 9)[:, :, 3:7], cache, INT4)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("size", [64, 256])
def test_large_keys_queries_and_values(size: int, formats: Formats) -> None:
    """Beyond what float16 holds: scores of unit size all the same."""
    keys, values = (tokens_of(400, 1, size, seed=each) for each in (1, 2))
    bounds = bounds_of([400], warm=64)
    query = tokens_of(1, 2, size, seed=9).transpose(0, 1)
    cache = slab_cache(bounds, 1, size, formats, [keys * 2.0**17], [values])
    assert_right(query, cache, formats, scale=0.125 * 2.0**-17)
    cache = slab_cache(bounds, 1, size, formats, [keys], [values])
    assert_right(query * 2.0**17, cache, formats, scale=0.125 * 2.0**-17)


def test_scores_far_apart_do_not_overflow() -> None:
    cache = slab_cache(bounds_of([700]), 1, 64, INT4)
    query = 300 * tokens_of(1, 2, 64, seed=9).transpose(0, 1)
    out, lse = attended(query, cache, INT4, 3, 1.0)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_sequences_that_share_slabs() -> None:
    cache = slab_cache(bounds_of([700, 700]), 1, 64, INT4)
    for table in cache[1:3]:
        table[1, :-1] = table[0, :-1]
    assert_right(tokens_of(2, 2, 64, seed=9).transpose(0, 1), cache, INT4)


def test_merges_of_many_runs_and_of_few() -> None:
    cache = slab_cache(bounds_of([900, 70]), 1, 64, INT4)
    query = tokens_of(2, 2, 64, seed=9).transpose(0, 1)
    assert_right(query, cache, INT4, num_runs=70)
    assert_right(query, cache, INT4, num_runs=8)


@pytest.mark.parametrize("slab", [-1, 2**20])
def test_a_slab_beyond_the_arena_is_noticed(slab: int) -> None:
    cache = slab_cache(bounds_of([700]), 1, 64, INT4)
    for place in (0, 5):
        table = cache.key_tables.clone()
        table[0, place] = slab
        wrong = cache._replace(key_tables=table)
        with pytest.raises(DeviceAssertion, match="a slab beyond the arena"):
            attended(tokens_of(1, 1, 64, seed=9).transpose(0, 1), wrong, INT4, 2, 1.0)


def test_a_block_out_of_its_grain_is_noticed() -> None:
    cache = slab_cache(bounds_of([300], sink=0, warm=0), 1, 64, FORMATS[2])
    cache.key_tables[0, :2] = cache.key_tables[0, :2].flip(0)
    with pytest.raises(DeviceAssertion, match="a slab out of its place in a grain"):
        attended(tokens_of(1, 1, 64, seed=9).transpose(0, 1), cache, FORMATS[2], 1, 1.0)


@pytest.mark.parametrize("name", ["key_meta", "value_meta"])
def test_slots_that_are_none_of_those_slabs_are_refused(name: str) -> None:
    cache = slab_cache(bounds_of([300]), 1, 64, INT4)
    meta = getattr(cache.slabs, name)
    wrong = cache._replace(slabs=cache.slabs._replace(**{name: meta[: len(meta) // 2]}))
    expected = f"{name} must be of {len(meta)} slots, for {len(meta)} slabs and blocks of 4 bits"
    with pytest.raises(ContractError, match=expected):
        attended(tokens_of(1, 1, 64, seed=9).transpose(0, 1), wrong, INT4, 1, 1.0)


def test_what_no_kernel_reads_is_refused() -> None:
    cache = slab_cache(bounds_of([64]), 1, 64, INT4)
    wide = slab_cache(bounds_of([64]), 1, 96, INT4)
    with pytest.raises(ContractError, match="of heads of 64 or 128 or 256, came 96"):
        attended(torch.zeros(1, 1, 96).bfloat16(), wide, INT4, 1, 1.0)
    with pytest.raises(ContractError, match="at most 16 heads a KV head, came 17"):
        attended(torch.zeros(1, 17, 64).bfloat16(), cache, INT4, 1, 1.0)
    with pytest.raises(ContractError, match="of 3 tokens a sequence, came 6"):
        attended(torch.zeros(1, 3, 6, 64).bfloat16(), cache, INT4, 1, 1.0)
    for query_len in (0, 5):
        with pytest.raises(ContractError, match=f"of 1 to 4 tokens a sequence, came {query_len}"):
            attended(torch.zeros(1, query_len, 1, 64).bfloat16(), cache, INT4, 1, 1.0)
    with pytest.raises(ContractError, match="query must be bfloat16, came float32"):
        attended(torch.zeros(1, 2, 64), cache, INT4, 1, 1.0)


def test_as_many_runs_as_run_at_once() -> None:
    device = torch.device("cpu")  # 2 SMs, 8 programs each, or 6 of wide heads
    assert num_runs_of(device, 4, 1) == 16
    assert num_runs_of(device, 16, 2) == 8
    assert num_runs_of(device, 16, 1, query_len=1) == 16
    assert num_runs_of(device, 8, 1, size=256) == 12
    assert num_runs_of(device, 16, 1, size=256) == 6
    assert num_runs_of(device, 400, 100) == 1


def test_every_launch_of_a_served_model_has_its_variant() -> None:
    formats = SERVED_FORMATS
    cache = slab_cache(bounds_of([700, 0]), 2, reference.SERVED_SIZE, formats)
    query = torch.zeros(2, 8, reference.SERVED_SIZE).bfloat16()
    for num_runs in (2, 100):
        plan = tiered_plan(cache.bounds, num_runs, formats)
        arguments = (query, cache.slabs, *cache[1:3], plan, formats, 0.1)
        assert_bundled(lambda arguments=arguments: tiered_decode(*arguments))
