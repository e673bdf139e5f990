"""How many tokens of context fit into a pool, found by filling it."""

from engine.cache.block_address import SequenceAddresses
from engine.cache.formats import Part
from engine.cache.kv_arenas import KvArenas, LayerGroup, share_out
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_table import TieredTable, check_arenas
from engine.errors import ArenaExhausted

LLAMA_8B = LayerGroup(num_layers=32, num_kv_heads=8, head_dim=128)
NUM_SEQUENCES = 20  # of the pool's sequences, in bf16


def num_tokens_held(config: TierConfig, num_tokens: int, *, shared_out_for: int) -> int:
    """Tokens of sequences of `num_tokens` each, prefilled and about to decode, until the next does
    not fit. The pool has the bytes, metadata slots included, of `NUM_SEQUENCES` sequences of
    `shared_out_for` tokens in bf16; keys and values share them for sequences of that length."""
    exact = TierConfig(exact=True)
    num_bf16_slabs = sum(share_of(exact, shared_out_for))
    num_bytes = NUM_SEQUENCES * num_bf16_slabs * LLAMA_8B.slab_bytes(exact)
    arenas = KvArenas.create(*share_out(num_bytes, LLAMA_8B, config, shared_out_for), config)
    assert arenas.num_bytes(LLAMA_8B, config) <= num_bytes
    tables: list[TieredTable] = []
    while not tables or tables[-1].num_tokens > num_tokens:
        addresses = SequenceAddresses(b"", (), b"", config.block_size)
        tables.append(TieredTable(arenas, config, addresses))
        _fill(tables[-1], arenas, num_tokens)
    check_arenas(arenas, tables)
    return sum(table.num_tokens for table in tables)


def share_of(config: TierConfig, num_tokens: int) -> tuple[int, int]:
    """Slabs of keys and of values that one decoding sequence fills."""
    ages = config.decode_ages(num_tokens)
    keys, values = (config.num_slabs(ages, num_tokens, part) for part in Part)
    return keys, values


def _fill(table: TieredTable, arenas: KvArenas, num_tokens: int) -> None:
    """All of its tokens and one more; or as many as there is room for."""
    try:
        while table.num_tokens <= num_tokens:
            epoch = arenas.epochs.begin()
            if table.num_tokens < num_tokens:
                table.extend_prefill(num_tokens - table.num_tokens)
            else:
                table.extend_decode()
            arenas.epochs.finish(epoch)
    except ArenaExhausted:
        arenas.epochs.finish(arenas.epochs.begun)
