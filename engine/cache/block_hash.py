"""The content address of a full block: a hash chained over every token before its end.

Equal hashes mean equal KV: the root binds the chain to one model, cache format and tenant.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(address: bytes, cache_salt: bytes) -> bytes:
    """Parent of a first block. `address` names model and cache format, `cache_salt` the tenant."""
    # The length keeps (b"ab", b"c") and (b"a", b"bc") apart.
    length = struct.pack("<Q", len(address))
    return blake2b(length + address + cache_salt, digest_size=HASH_BYTES).digest()


def extend(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of the block that holds `token_ids` (each in [0, 2**32)) and follows `parent`."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(parent + packed, digest_size=HASH_BYTES).digest()


def extend_chain(
    chain: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    num_tokens: int | None = None,
) -> None:
    """Append to `chain`, in place, the hashes of the full blocks of `token_ids` it still lacks;
    of the first `num_tokens` of them only, if that is said."""
    end = len(token_ids) if num_tokens is None else num_tokens
    for start in range(len(chain) * block_size, end - block_size + 1, block_size):
        parent = chain[-1] if chain else root
        chain.append(extend(parent, token_ids[start : start + block_size]))
