from hypothesis import given
from hypothesis import strategies as st

from kernels.sampling.uniform import counter_uniform, int64_of


def splitmix(state: int) -> int:
    mask = (1 << 64) - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_the_counter_hash_in_whole_numbers(seed: int, position: int) -> None:
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15
    key = splitmix((seed + gamma) & mask)
    expected = (splitmix((key + (position + 1) * gamma) & mask) >> 11) / 2**53

    (uniform,) = counter_uniform(int64_of([seed]), int64_of([position])).tolist()

    assert uniform == expected
    assert 0.0 <= uniform < 1.0


def test_uniforms_of_neighbouring_seeds_and_positions_are_uniform() -> None:
    seeds = int64_of(range(100)).repeat_interleave(100)
    positions = int64_of(range(100)).repeat(100)

    uniforms = counter_uniform(seeds, positions)

    assert len(uniforms.unique()) == 10_000
    counts = (uniforms * 20).long().bincount(minlength=20).double()
    chi_squared = float(((counts - 500).square() / 500).sum())
    assert chi_squared < 19 + 5 * 38**0.5 + 15
    grid = uniforms.view(100, 100)
    for shifted in (grid[1:, :] - grid[:-1, :], grid[:, 1:] - grid[:, :-1]):
        assert abs(float(shifted.square().mean()) - 1 / 6) < 0.005  # of independent uniforms
