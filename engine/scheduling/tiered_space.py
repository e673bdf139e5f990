"""KV that ages: every sequence has a table in each layer group, over arenas of slabs."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from engine.cache.column import Demotion
from engine.cache.formats import WARM, Format, Part
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_span import TieredSpan
from engine.cache.tiered_table import Span, check_arenas
from engine.cache.tiers import BlockSpill
from engine.errors import CacheTooSmall, IntegrityError
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.budget import Candidate, PrefillBudget
from engine.scheduling.decode import age
from engine.scheduling.tenure import ArenaGroup, Opening, Tenure, open_decoded, open_prompt
from engine.sequence import Sequence, SequenceStatus

Slabs = tuple[int, ...]  # a number for each arena: of keys and of values, by layer group


class TieredSpace:
    """As `KvSpace`. What a step frees can be given away once the device is done with that step, so
    a sequence may wait a step for room that is its own already.

    `address` names the model; it salts the chains of tokens. All groups share their `Epochs` and
    the rule of ages. `replays_decodes`: what a preempted sequence had decoded is stored as it was,
    token by token, so that nobody can tell; otherwise it is prefilled with the prompt.
    """

    def __init__(
        self,
        groups: Items[ArenaGroup],
        address: bytes,
        *,
        enable_prefix_cache: bool = True,
        replays_decodes: bool = False,
    ) -> None:
        self._groups = tuple(groups)
        self._address = address
        self._enable_prefix_cache = enable_prefix_cache
        self._replays_decodes = replays_decodes
        self._epochs = groups[0].arenas.epochs
        self._arenas = [group.arenas.of(part) for group in groups for part in Part]
        self._none: Slabs = (0,) * len(self._arenas)
        self._growth = self._by_arena(_num_growing)
        self._tenures: dict[Sequence, Tenure] = {}
        self._decode_starts: dict[Sequence, int] = {}  # of preempted sequences
        self._demotions: list[list[Demotion]] = [[] for _ in groups]
        self._num_in_flight = 0

    @property
    def block_size(self) -> int:
        return self._groups[0].config.block_size

    @property
    def num_blocks(self) -> int:
        """Of the densest format, where they are fewest."""
        return min(arena.num_grains for arena in self._arenas)

    @property
    def num_free_blocks(self) -> int:
        return min(arena.num_unreferenced_slabs // arena.grain for arena in self._arenas)

    def require_capacity(self, max_model_len: int) -> None:
        needed = self._by_arena(lambda config, part: num_slabs_needed(config, part, max_model_len))
        for index, (arena, num_slabs) in enumerate(zip(self._arenas, needed, strict=True)):
            if arena.num_slabs < num_slabs:
                group, part = divmod(index, len(Part))
                raise CacheTooSmall(
                    f"one sequence of max_model_len {max_model_len} needs {num_slabs} slabs of "
                    f"{Part(part).name.lower()} in layer group {group}, the arena holds "
                    f"{arena.num_slabs}; raise kv_cache_bytes or lower max_model_len"
                )

    def prepare(self, sequence: Sequence) -> None:
        if self._enable_prefix_cache:
            sequence.hash_blocks(self._address, self.block_size)

    def begin(self) -> None:
        if self._num_in_flight == 0:
            self._epochs.finish(self._epochs.begun)

    def plan_decodes(
        self, running: list[Sequence]
    ) -> tuple[list[ScheduledSequence], list[Sequence]]:
        preempted: list[Sequence] = []
        while len(running) > 1 and not self._could_give(self._needs_of_step(running)):
            preempted.append(self._preempt(running.pop()))
        self._epochs.begin()  # what victims leave is of the step before, and free as soon as that
        scheduled = []
        for sequence in running:
            tenure = self._tenures[sequence]
            if self._decodes(sequence, tenure):
                start = tenure.num_tokens
                spans = self._extend_decode(tenure)
                if spans:
                    scheduled.append(ScheduledSequence(sequence, start, 1, spans))
        return scheduled, preempted

    def find_prefilling(self, running: Iterable[Sequence]) -> list[Candidate]:
        tenures = ((sequence, self._tenures[sequence]) for sequence in running)
        return [
            Candidate(sequence, tenure.prefill_end - tenure.num_tokens)
            for sequence, tenure in tenures
            if tenure.is_prefilling
        ]

    def find_admissible(
        self, waiting: list[Sequence], running: list[Sequence], max_num_sequences: int
    ) -> list[Candidate]:
        """The head of `waiting` that fits beside `running`: all of the prompt, what running
        prefills still need, and growth for everybody. The first that does not fit holds back those
        behind it, or they would take its place for ever. Alone, a sequence always fits."""
        found: list[Candidate] = []
        claimed = self._sum(self._claim(self._tenures[sequence]) for sequence in running)
        for sequence in waiting[: max_num_sequences - len(running)]:
            opening = self._open(sequence)
            claimed = self._sum((claimed, self._price(opening, sequence), self._growth))
            if not self._could_give(claimed) and (running or found):
                break
            num_cached = opening.num_blocks * self.block_size
            found.append(Candidate(sequence, max(1, opening.prefill_end - num_cached)))
        return found

    def plan_prefills(
        self, candidates: list[Candidate], budget: PrefillBudget
    ) -> list[ScheduledSequence]:
        scheduled = []
        candidates = sorted(candidates, key=lambda candidate: age(candidate.sequence))
        for candidate, num_granted in zip(candidates, budget.share(candidates), strict=True):
            sequence = candidate.sequence
            if num_granted and sequence.status is SequenceStatus.WAITING:
                self._admit(sequence)
            if num_granted:
                tenure = self._tenures[sequence]
                start = tenure.num_tokens
                if tenure.is_prefilling:
                    spans = self._extend_prefill(tenure, num_granted)
                else:
                    spans = self._extend_decode(tenure)
                if spans:
                    num_new_tokens = tenure.num_tokens - start
                    entry = ScheduledSequence(sequence, start, num_new_tokens, spans)
                    scheduled.append(entry)
        return scheduled

    def plan(
        self, scheduled: tuple[ScheduledSequence, ...], preempted: tuple[str, ...]
    ) -> ScheduledBatch:
        demotions = tuple(map(tuple, self._demotions))
        self._demotions = [[] for _ in self._groups]
        self._num_in_flight += bool(scheduled)
        return ScheduledBatch(scheduled, preempted, demotions=demotions, epoch=self._epochs.begun)

    def await_progress(self, timeout_s: float) -> None:
        """Nothing comes from outside; what the last step freed is there by now."""

    def cached_blocks(self) -> tuple[BlockSpill, ...]:
        return ()

    def register_filled(self, entry: ScheduledSequence) -> None:
        tenure = self._tenures.get(entry.sequence)
        if tenure is not None and self._enable_prefix_cache:
            self.prepare(entry.sequence)
            for table in tenure.tables:
                table.register_filled()

    def finish(self, batch: ScheduledBatch) -> None:
        self._epochs.finish(batch.epoch)
        self._num_in_flight -= 1

    def release(self, sequence: Sequence) -> None:
        self._decode_starts.pop(sequence, None)
        self._leave(sequence)

    def check_integrity(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        for sequence in waiting:
            if sequence in self._tenures:
                raise IntegrityError(f"{sequence.seq_id} waits and owns blocks")
        if self._tenures.keys() != set(running):
            raise IntegrityError(f"{len(self._tenures)} have a place, {len(running)} run")
        for index, group in enumerate(self._groups):
            tables = [tenure.tables[index] for tenure in self._tenures.values()]
            check_arenas(group.arenas, tables)
        for sequence, tenure in self._tenures.items():
            for table in tenure.tables:
                if table.num_tokens != sequence.num_computed_tokens:
                    raise IntegrityError(
                        f"{sequence.seq_id} has {sequence.num_computed_tokens} tokens computed, "
                        f"its table {table.num_tokens}"
                    )

    def _decodes(self, sequence: Sequence, tenure: Tenure) -> bool:
        return not (tenure.is_prefilling or sequence.is_planned_out)

    def _needs_of_step(self, running: list[Sequence]) -> Slabs:
        """Of every decode, and of the oldest prefill's next block: it must not stand still."""
        needs = []
        for index, sequence in enumerate(running):
            tenure = self._tenures[sequence]
            if self._decodes(sequence, tenure):
                needs.append(_decode_need(tenure))
            elif index == 0 and tenure.is_prefilling:
                needs.append(_prefill_need(tenure, 1))
        return self._sum(needs)

    def _extend_decode(self, tenure: Tenure) -> tuple[TieredSpan, ...]:
        """A token, if there is room for it now."""
        if not self._can_give_now(_decode_need(tenure)):
            return ()
        return (self._told(tenure, [table.extend_decode() for table in tenure.tables]),)

    def _extend_prefill(self, tenure: Tenure, num_tokens: int) -> tuple[TieredSpan, ...]:
        """As far as there is room now, a span in each grid cell."""
        spans: list[TieredSpan] = []
        end = min(tenure.num_tokens + num_tokens, tenure.prefill_end)
        while num_fitting := self._num_fitting(tenure, end - tenure.num_tokens):
            extended = [table.extend_prefill(num_fitting) for table in tenure.tables]
            spans.append(self._told(tenure, extended))
        return tuple(spans)

    def _num_fitting(self, tenure: Tenure, num_tokens: int) -> int:
        """All up to the end of the cell, or else of the block, or none."""
        num_in_block = self.block_size - tenure.num_tokens % self.block_size
        for num_wanted in (num_tokens, min(num_tokens, num_in_block)):
            if num_wanted and self._can_give_now(_prefill_need(tenure, num_wanted)):
                return num_wanted
        return 0

    def _told(self, tenure: Tenure, spans: list[Span]) -> TieredSpan:
        for demotions, span in zip(self._demotions, spans, strict=True):
            demotions += span.demotions
        return tenure.span_of(spans)

    def _open(self, sequence: Sequence) -> Opening:
        start = self._decode_starts.get(sequence)
        if start is not None:
            opening = open_decoded(self._groups, sequence, start)
            if opening is not None:
                return opening
        prefill_end = sequence.num_prompt_tokens if self._replays_decodes else sequence.num_tokens
        return open_prompt(self._groups, sequence, prefill_end)

    def _admit(self, sequence: Sequence) -> None:
        # Opened again: an older candidate's chunk may have evicted what the first look found.
        tenure = self._open(sequence).take(self._groups)
        self._tenures[sequence] = tenure
        sequence.num_computed_tokens = tenure.num_tokens
        sequence.status = SequenceStatus.RUNNING
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = tenure.num_tokens

    def _preempt(self, victim: Sequence) -> Sequence:
        """Its full blocks stay cached while nobody needs them."""
        decode_start = self._tenures[victim].tables[0].decode_start
        if decode_start is not None:
            self._decode_starts[victim] = decode_start
        self._leave(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = SequenceStatus.WAITING
        return victim

    def _leave(self, sequence: Sequence) -> None:
        tenure = self._tenures.pop(sequence, None)
        if tenure is not None:
            for table in tenure.tables:
                table.close()

    def _claim(self, tenure: Tenure) -> Slabs:
        """What a running sequence may still want, beside what it has."""
        if not tenure.is_prefilling:
            return self._growth
        worst = self._worst(tenure.prefill_end)
        held = [table.num_slabs(part) for table in tenure.tables for part in Part]
        missing = tuple(max(0, most - has) for most, has in zip(worst, held, strict=True))
        return self._sum((missing, self._growth))

    def _price(self, opening: Opening, sequence: Sequence) -> Slabs:
        """What its admission takes: blocks that others refer to as well cost nothing."""
        shared = tuple(
            group.arenas.of(part).num_referenced_slabs(match.blocks(part))
            for group, match in zip(self._groups, opening.matches, strict=True)
            for part in Part
        )
        worst = self._worst(sequence.num_tokens)
        return tuple(max(0, most - has) for most, has in zip(worst, shared, strict=True))

    def _worst(self, num_tokens: int) -> Slabs:
        """That a sequence of so many tokens holds, right after its prefill; and what it takes to
        move on from there, while what is demoted may still be read."""
        return self._by_arena(lambda config, part: _num_most(config, part, num_tokens))

    def _by_arena(self, count: Callable[[TierConfig, Part], int]) -> Slabs:
        return tuple(count(group.config, part) for group in self._groups for part in Part)

    def _sum(self, slabs: Iterable[Slabs]) -> Slabs:
        return tuple(map(sum, zip(self._none, *slabs, strict=True)))

    def _could_give(self, needed: Slabs) -> bool:
        """If no step were in flight."""
        pairs = zip(self._arenas, needed, strict=True)
        return all(arena.num_unreferenced_slabs >= num_slabs for arena, num_slabs in pairs)

    def _can_give_now(self, needed: Slabs) -> bool:
        pairs = zip(self._arenas, needed, strict=True)
        return all(num == 0 or arena.num_available_slabs >= num for arena, num in pairs)


def num_slabs_needed(config: TierConfig, part: Part, max_model_len: int) -> int:
    """Without which one sequence, alone, could not reach every length up to `max_model_len` from a
    prompt of any length."""
    cell_end = max_model_len // config.cell_tokens * config.cell_tokens  # holds most in bf16
    most = max(_num_most(config, part, num_tokens) for num_tokens in (cell_end, max_model_len))
    return most + _num_growing(config, part)


def _decode_need(tenure: Tenure) -> Slabs:
    return tuple(num for table in tenure.tables for num in table.decode_need().values())


def _prefill_need(tenure: Tenure, num_tokens: int) -> Slabs:
    return tuple(num for table in tenure.tables for num in table.prefill_need(num_tokens).values())


def _num_growing(config: TierConfig, part: Part) -> int:
    """That a decoding sequence takes when it enters a block, before it gives anything back."""
    if config.exact:
        return Format.BF16.num_slabs
    return sum(tier.num_slabs for tier in (Format.BF16, WARM[part], config.cold[part]))


def _num_most(config: TierConfig, part: Part, num_tokens: int) -> int:
    ages = config.prefill_ages(num_tokens - 1)
    num_slabs = config.num_slabs(ages, num_tokens, part)
    if config.exact:
        return num_slabs
    num_warm = config.warm_tokens // config.block_size * WARM[part].num_slabs
    num_cold = config.cell_tokens // config.block_size * config.cold[part].num_slabs
    return num_slabs + num_warm + num_cold
