"""Which numbers of ranks a model's attention heads can be dealt out to."""

from engine.errors import UnsupportedModel


def fits_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    """Equal heads on every rank, and every query beside its KV head: a rank holds some KV heads,
    or several ranks hold a copy of one."""
    deals_out = num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
    return num_heads % num_ranks == 0 and deals_out


def sizes_that_work(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    sizes = range(1, num_heads + 1)
    return tuple(size for size in sizes if fits_heads(num_heads, num_kv_heads, size))


def refuse_uneven_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raises UnsupportedModel naming the sizes that work."""
    if num_ranks < 1 or not fits_heads(num_heads, num_kv_heads, num_ranks):
        sizes = ", ".join(str(size) for size in sizes_that_work(num_heads, num_kv_heads))
        raise UnsupportedModel(
            f"{num_heads} attention heads and {num_kv_heads} KV heads cannot be dealt out to "
            f"{num_ranks} ranks; set tensor_parallel_size to one of {sizes}"
        )
