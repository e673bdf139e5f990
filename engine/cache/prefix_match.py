"""The longest head of a sequence that is cached, in the very formats its next token has to see."""

from dataclasses import dataclass
from itertools import takewhile

from engine.cache.block_address import SequenceAddresses
from engine.cache.formats import Format, Part
from engine.cache.kv_arenas import KvArenas
from engine.cache.tier_config import Ages, TierConfig


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks for `TieredTable.adopt`, good until the next `allocate`."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    ages: Ages

    @property
    def num_blocks(self) -> int:
        return len(self.keys)

    def blocks(self, part: Part) -> tuple[int, ...]:
        return self.keys if part is Part.KEYS else self.values


class PrefixMatcher:
    """Looks for the blocks of one sequence, of keys and values both."""

    def __init__(self, arenas: KvArenas, config: TierConfig, addresses: SequenceAddresses) -> None:
        self._arenas = arenas
        self._config = config
        self._addresses = addresses

    def match_prompt(self, max_blocks: int) -> PrefixMatch:
        """At most `max_blocks` blocks, made by prefill, after which prefill goes on as if it had
        made them itself: so the bf16 ones that the cell of the next token sees are among them."""
        config = self._config
        cell_blocks = config.cell_tokens // config.block_size
        for first in range(max_blocks // cell_blocks * cell_blocks, -1, -cell_blocks):
            ages = config.prefill_ages(first * config.block_size)
            match = self._match(ages, first, min(first + cell_blocks - 1, max_blocks))
            if match is not None:
                return match
        return PrefixMatch((), (), config.prefill_ages(0))

    def match_decoded(self, max_blocks: int) -> PrefixMatch | None:
        """All blocks, `max_blocks` at most, up to where a sequence that has decoded, and lost its
        table, decodes on."""
        config, decode_start = self._config, self._addresses.decode_start
        assert decode_start is not None
        for num_blocks in range(min(len(self._addresses.chain), max_blocks), -1, -1):
            if num_blocks * config.block_size < decode_start:
                break
            ages = config.decode_ages(num_blocks * config.block_size)
            match = self._match(ages, num_blocks, num_blocks)
            if match is not None:
                return match
        return None

    def _match(self, ages: Ages, least: int, most: int) -> PrefixMatch | None:
        """The hot run first: it is short, and the first to go."""
        hot_start = min(ages.hot_start, most)
        hot = list(takewhile(bool, (self._find(i, ages) for i in range(hot_start, most))))
        if hot_start + len(hot) < least:
            return None
        head = list(takewhile(bool, (self._find(i, ages) for i in range(hot_start))))
        if len(head) < hot_start:
            return PrefixMatch((), (), ages) if least == 0 else None
        pairs = [pair for pair in head + hot if pair is not None]
        return PrefixMatch(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), ages)

    def _find(self, index: int, ages: Ages) -> tuple[int, int] | None:
        stored_as = self._config.format_at(ages, index)
        keys, values = (self._find_part(part, index, ages, stored_as[part]) for part in Part)
        return None if keys is None or values is None else (keys, values)

    def _find_part(self, part: Part, index: int, ages: Ages, stored_as: Format) -> int | None:
        decode_start = self._addresses.decode_start
        # Decode lets tokens grow warm before they are cold; prefill does not.
        is_requantised = (
            stored_as is Format.INT4
            and decode_start is not None
            and self._config.warm_tokens > 0
            and index >= self._config.decode_ages(decode_start).warm_start
        )
        address = self._addresses.of(part, index, stored_as, is_requantised=is_requantised)
        return None if address is None else self._arenas.of(part).find(address)
