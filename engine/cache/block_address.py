"""The address of a stored block: its tokens, and everything else that its bytes depend on.

Equal addresses mean equal bytes, whoever made them, in whichever step, however work was cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from engine.cache.block_hash import HASH_BYTES
from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig


@dataclass(frozen=True, slots=True)
class CacheVersion:
    """What all blocks of one layer group on one rank have in common. `tiers` is among it because
    what earlier tokens were stored as is what the keys of later ones were computed from."""

    weights_sha: str
    layer_group: str
    tp_size: int
    tp_rank: int
    tiers: TierConfig
    layout: int
    rotation: str
    calibration: str
    adapter: str = ""

    def digest(self) -> bytes:
        return blake2b(repr(self).encode(), digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Provenance:
    """How stored keys or values came to be, where their tokens do not say.

    `decode_start`: the position from which on this sequence decoded, if that is before the block's
    end; None for what prefill made. Prefill and decode see earlier tokens in other formats.
    `is_requantised`: rounded from INT8 and not from bf16.
    """

    decode_start: int | None = None
    is_requantised: bool = False


@dataclass(slots=True)
class SequenceAddresses:
    """Of one sequence in one layer group. `chain` are the hashes of its full blocks as far as its
    tokens are known, of `extend_chain`; it is shared with the sequence, and grows with it. A
    sequence that is prefilled anew, with what it decoded, has new ones."""

    version: bytes  # the digest of a CacheVersion
    chain: Sequence[bytes]
    tenant: bytes
    block_size: int
    decode_start: int | None = None

    def of(
        self, part: Part, index: int, block_format: Format, *, is_requantised: bool = False
    ) -> bytes | None:
        """None while not all tokens of the block are known, and so for one that is not full."""
        if index >= len(self.chain):
            return None
        is_decoded = self.decode_start is not None and (
            self.decode_start < (index + 1) * self.block_size
        )
        provenance = Provenance(self.decode_start if is_decoded else None, is_requantised)
        return self.chain[index] + _suffix(self.version, part, block_format, provenance)


@lru_cache(maxsize=4096)
def _suffix(version: bytes, part: Part, block_format: Format, provenance: Provenance) -> bytes:
    start = provenance.decode_start
    how = f"{part:d} {block_format:d} {'prefill' if start is None else start}"
    how += " requantised" if provenance.is_requantised else ""
    return blake2b(version + how.encode(), digest_size=HASH_BYTES).digest()
