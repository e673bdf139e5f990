"""One step's plan as the other ranks receive it: what changed since the last one, and no tokens
that they sampled themselves.

Layout, little-endian: `<HHI` version, reserved, number of chunks; then for each chunk `<HHIIII` of
slot, flags, start, number of new tokens, kept blocks, new blocks; its new blocks and, if the flag
says so, its tokens, 4 bytes each. 20 bytes for a decoding sequence, 24 when it enters a block.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import IntegrityError

PLAN_VERSION = 1
_HEADER = struct.Struct("<HHI")
_CHUNK = struct.Struct("<HHIIII")
_SAMPLES, _CARRIES_TOKENS = 1, 2


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """`num_new_tokens` tokens from position `start` on of the sequence that owns `slot`.

    `token_ids` None: one token, the last that was sampled for the slot. The block table is the
    first `num_kept_blocks` of what it was in the slot's last plan, then `new_blocks`.
    """

    slot: int
    start: int
    num_new_tokens: int
    token_ids: tuple[int, ...] | None
    num_kept_blocks: int
    new_blocks: tuple[int, ...]
    samples: bool


def encode_plan(chunks: Sequence[PlannedChunk]) -> bytes:
    parts = [_HEADER.pack(PLAN_VERSION, 0, len(chunks))]
    for chunk in chunks:
        carries_tokens = chunk.token_ids is not None
        parts.append(
            _CHUNK.pack(
                chunk.slot,
                _SAMPLES * chunk.samples | _CARRIES_TOKENS * carries_tokens,
                chunk.start,
                chunk.num_new_tokens,
                chunk.num_kept_blocks,
                len(chunk.new_blocks),
            )
        )
        parts.append(_pack(chunk.new_blocks))
        if chunk.token_ids is not None:
            parts.append(_pack(chunk.token_ids))
    return b"".join(parts)


def decode_plan(encoded: bytes) -> tuple[PlannedChunk, ...]:
    """Raises IntegrityError for another version or a plan that is not whole."""
    try:
        version, _, num_chunks = _HEADER.unpack_from(encoded)
        if version != PLAN_VERSION:
            raise IntegrityError(f"a plan of version {version} came, expected {PLAN_VERSION}")
        chunks, offset = [], _HEADER.size
        for _ in range(num_chunks):
            chunk, offset = _decode_chunk(encoded, offset)
            chunks.append(chunk)
    except struct.error as exc:
        raise IntegrityError(f"a plan of {len(encoded)} bytes is cut short: {exc}") from exc
    if offset != len(encoded):
        raise IntegrityError(f"a plan of {len(encoded)} bytes ends at byte {offset}")
    return tuple(chunks)


def max_plan_bytes(max_num_chunks: int, max_num_tokens: int, max_num_blocks: int) -> int:
    """`max_num_blocks` of one sequence."""
    num_words = max_num_tokens + max_num_chunks * max_num_blocks
    return _HEADER.size + max_num_chunks * _CHUNK.size + 4 * num_words


def _decode_chunk(encoded: bytes, offset: int) -> tuple[PlannedChunk, int]:
    slot, flags, start, num_new_tokens, num_kept, num_new = _CHUNK.unpack_from(encoded, offset)
    blocks_at = offset + _CHUNK.size
    tokens_at = end = blocks_at + 4 * num_new
    token_ids = None
    if flags & _CARRIES_TOKENS:
        token_ids = struct.unpack_from(f"<{num_new_tokens}I", encoded, tokens_at)
        end = tokens_at + 4 * num_new_tokens
    new_blocks = struct.unpack_from(f"<{num_new}I", encoded, blocks_at)
    samples = bool(flags & _SAMPLES)
    return PlannedChunk(slot, start, num_new_tokens, token_ids, num_kept, new_blocks, samples), end


def _pack(numbers: Iterable[int]) -> bytes:
    numbers = tuple(numbers)
    return struct.pack(f"<{len(numbers)}I", *numbers)
