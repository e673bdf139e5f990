"""Where a running sequence's KV lies in a tiered cache, and what a waiting one could begin with."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from engine.cache.block_address import SequenceAddresses
from engine.cache.kv_arenas import KvArenas
from engine.cache.prefix_match import PrefixMatch, PrefixMatcher
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_span import TieredSpan
from engine.cache.tiered_table import Span, TieredTable
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ArenaGroup:
    """The arenas of one layer group; `version` is the digest of its `CacheVersion`."""

    config: TierConfig
    arenas: KvArenas
    version: bytes


@dataclass(frozen=True, slots=True)
class Tenure:
    """Tokens from `prefill_end` on are stored by the rule of decoding: one by one, those too that
    are known already, because the sequence had been preempted."""

    tables: tuple[TieredTable, ...]  # by layer group, all of the same tokens
    prefill_end: int

    @property
    def num_tokens(self) -> int:
        return self.tables[0].num_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_tokens < self.prefill_end

    def span_of(self, spans: Items[Span]) -> TieredSpan:
        """What a step is told of the span by which each table was just extended."""
        first = spans[0]
        views = tuple(table.view for table in self.tables)
        return TieredSpan(first.start, first.end, first.start >= self.prefill_end, views)


@dataclass(frozen=True, slots=True)
class Opening:
    """The longest head of a sequence that is cached in all layer groups, and how it goes on. Good
    until the next slab is allocated."""

    addresses: tuple[SequenceAddresses, ...]  # by layer group
    matches: tuple[PrefixMatch, ...]
    prefill_end: int

    @property
    def num_blocks(self) -> int:
        return self.matches[0].num_blocks

    def take(self, groups: Items[ArenaGroup]) -> Tenure:
        """One reference more for every block."""
        tables = []
        for group, addresses, match in zip(groups, self.addresses, self.matches, strict=True):
            table = TieredTable(group.arenas, group.config, addresses)
            table.adopt(match.keys, match.values, match.ages)
            tables.append(table)
        return Tenure(tuple(tables), self.prefill_end)


def open_prompt(groups: Items[ArenaGroup], sequence: Sequence, prefill_end: int) -> Opening:
    """The tokens up to `prefill_end` are prefilled: the last of them in any case, to be sampled
    after."""
    addresses = tuple(_addresses(group, sequence) for group in groups)
    most = (prefill_end - 1) // groups[0].config.block_size
    while True:
        matches = [
            PrefixMatcher(group.arenas, group.config, each).match_prompt(most)
            for group, each in zip(groups, addresses, strict=True)
        ]
        shortest = min(match.num_blocks for match in matches)
        if all(match.num_blocks == shortest for match in matches):
            return Opening(addresses, tuple(matches), prefill_end)
        most = shortest


def open_decoded(groups: Items[ArenaGroup], sequence: Sequence, start: int) -> Opening | None:
    """Of a sequence that was preempted, and had decoded from `start` on; None where what it decoded
    last is not there in all layer groups."""
    addresses = tuple(replace(_addresses(group, sequence), decode_start=start) for group in groups)
    most = (sequence.num_tokens - 1) // groups[0].config.block_size
    found = [
        PrefixMatcher(group.arenas, group.config, each).match_decoded(most)
        for group, each in zip(groups, addresses, strict=True)
    ]
    matches = tuple(match for match in found if match is not None)
    if len(matches) < len(groups) or len({match.num_blocks for match in matches}) > 1:
        return None
    return Opening(addresses, matches, start)


def _addresses(group: ArenaGroup, sequence: Sequence) -> SequenceAddresses:
    """They grow with the sequence."""
    return SequenceAddresses(
        group.version, sequence.block_hashes, sequence.cache_salt, group.config.block_size
    )
