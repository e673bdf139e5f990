"""Steps over a tiered cache planned by hand: a backend, or a runner, without a scheduler."""

from collections.abc import Sequence as Items
from itertools import count

from engine.cache.block_hash import extend_chain, root_hash
from engine.cache.column import Demotion
from engine.cache.epochs import Epochs
from engine.cache.kv_arenas import KvArenas
from engine.cache.tier_group import TierGroup
from engine.cache.tiered_span import TieredSpan
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.tenure import ArenaGroup, Tenure, open_prompt
from engine.sequence import Sequence, SequenceStatus
from tests.unit.engine.hand_batch import GREEDY

_names = count()


class TieredPlans:
    """Over arenas of its own. A step is over, for the books, before the next one is planned."""

    def __init__(self, groups: Items[TierGroup]) -> None:
        self._epochs = Epochs()
        self._groups = tuple(
            ArenaGroup(
                group.config,
                KvArenas.create(
                    group.num_key_slabs,
                    group.num_value_slabs,
                    group.config,
                    epochs=self._epochs,
                ),
                f"group {number}".encode(),
            )
            for number, group in enumerate(groups)
        )
        self.tenures: dict[Sequence, Tenure] = {}

    def open(self, token_ids: Items[int], params: SamplingParams = GREEDY) -> Sequence:
        """A prompt, with what of it is cached."""
        sequence = Sequence(
            f"tiered-{next(_names)}",
            list(token_ids),
            len(token_ids),
            params,
            status=SequenceStatus.RUNNING,
        )
        self._hash(sequence)
        tenure = open_prompt(self._groups, sequence, len(token_ids)).take(self._groups)
        self.tenures[sequence] = tenure
        sequence.num_computed_tokens = tenure.num_tokens
        return sequence

    def close(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        for table in self.tenures.pop(sequence).tables:
            table.close()

    def plan(self, *chunks: tuple[Sequence, int]) -> ScheduledBatch:
        """(sequence, number of tokens to compute next) for each sequence of the step."""
        epoch = self._epochs.begin()
        demotions: list[list[Demotion]] = [[] for _ in self._groups]
        scheduled = tuple(
            ScheduledSequence(
                sequence,
                sequence.num_computed_tokens,
                num_new_tokens,
                self._extend(self.tenures[sequence], num_new_tokens, demotions),
            )
            for sequence, num_new_tokens in chunks
        )
        return ScheduledBatch(scheduled, demotions=tuple(map(tuple, demotions)), epoch=epoch)

    def book(self, batch: ScheduledBatch) -> None:
        self._epochs.finish(batch.epoch)
        for entry in batch.scheduled:
            entry.sequence.num_computed_tokens = entry.end
            self._hash(entry.sequence)
            for table in self.tenures[entry.sequence].tables:
                table.register_filled()

    def _hash(self, sequence: Sequence) -> None:
        root = root_hash(b"model", b"")
        extend_chain(sequence.block_hashes, root, sequence.token_ids, 64)

    def _extend(
        self, tenure: Tenure, num_tokens: int, demotions: list[list[Demotion]]
    ) -> tuple[TieredSpan, ...]:
        spans, end = [], tenure.num_tokens + num_tokens
        while tenure.num_tokens < end:
            if tenure.is_prefilling:
                missing = end - tenure.num_tokens
                extended = [table.extend_prefill(missing) for table in tenure.tables]
            else:
                extended = [table.extend_decode() for table in tenure.tables]
            for made, span in zip(demotions, extended, strict=True):
                made += span.demotions
            spans.append(tenure.span_of(extended))
        return tuple(spans)
