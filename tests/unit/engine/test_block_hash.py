import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block_hash import HASH_BYTES, extend, extend_chain, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain_of(token_ids, *, address=b"model", cache_salt=b"", block_size=4):
    chain: list[bytes] = []
    extend_chain(chain, root_hash(address, cache_salt), token_ids, block_size)
    return chain


@given(TOKENS, st.integers(1, 8))
def test_chain_covers_full_blocks_only(token_ids, block_size):
    chain = chain_of(token_ids, block_size=block_size)
    assert len(chain) == len(token_ids) // block_size
    assert all(len(block_hash) == HASH_BYTES for block_hash in chain)


@given(TOKENS, TOKENS)
def test_chains_share_exactly_their_common_blocks(ours, theirs):
    for index, (mine, yours) in enumerate(zip(chain_of(ours), chain_of(theirs), strict=False)):
        end = (index + 1) * 4
        assert (mine == yours) == (ours[:end] == theirs[:end])


@given(TOKENS, st.integers(0, 40))
def test_growing_a_chain_equals_making_it_at_once(token_ids, cut):
    chain = chain_of(token_ids[:cut])
    extend_chain(chain, root_hash(b"model", b""), token_ids, 4)
    assert chain == chain_of(token_ids)


def test_same_block_after_another_parent_is_another_block():
    first, second = chain_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_tenants_and_models_never_share():
    token_ids = [1, 2, 3, 4]
    chains = [
        chain_of(token_ids, address=address, cache_salt=salt)
        for address, salt in [(b"a", b""), (b"b", b""), (b"a", b"x"), (b"ab", b"c"), (b"a", b"bc")]
    ]
    assert len({chain[0] for chain in chains}) == len(chains)


def test_hash_is_the_same_on_every_machine():
    root = root_hash(b"model", b"tenant")
    assert root.hex() == "13371ce5fb0cf6787778252a0185ddbe"
    assert extend(root, range(64)).hex() == "141db4d7398bd4d2923ef5fe54e0f10e"


def test_token_id_that_does_not_fit_is_refused():
    with pytest.raises(struct.error):
        extend(root_hash(b"", b""), [-1])
