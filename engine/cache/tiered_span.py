"""What a step is told of a sequence whose tokens age: where everything lies that its tokens see."""

from dataclasses import dataclass

from engine.cache.formats import Part
from engine.cache.guarded_queue import Ids


@dataclass(frozen=True, slots=True)
class View:
    """The table of one layer group as the tokens of a span see it, their own slabs among it.

    `bounds`: the tokens where sink, cold and warm run end, multiples of the block size, and where
    the span does. The columns are those of `TieredTable.slab_ids`; one that has not changed since
    an earlier span of the same sequence is the same array.
    """

    bounds: tuple[int, int, int, int]
    key_slabs: Ids
    value_slabs: Ids

    def slabs(self, part: Part) -> Ids:
        return self.key_slabs if part is Part.KEYS else self.value_slabs


@dataclass(frozen=True, slots=True)
class TieredSpan:
    """Tokens [start, end) of one sequence, which see the same formats; `views` by layer group.
    `is_decode`: one token, stored by the rule of decoding."""

    start: int
    end: int
    is_decode: bool
    views: tuple[View, ...]
