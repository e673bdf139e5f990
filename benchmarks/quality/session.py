"""An engine's runner, driven step by step: by forced tokens, or by its own."""

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.quality.paged_plans import EmulatedAges, PagedPlans
from benchmarks.quality.settings import AGES, Cache, Emulated
from engine.build import build_model_runner
from engine.cache.formats import BLOCK_SIZE
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.execution.drawn_tokens import DrawnTokens
from engine.execution.kv_tensors import block_bytes
from engine.execution.model_runner import ModelRunner
from engine.execution.sampler import Sampler
from engine.models.model_config import ModelConfig
from engine.outputs import PendingTokens
from engine.scheduling.batch import ScheduledBatch
from engine.sequence import Sequence
from tests.unit.engine.tiered_plans import TieredPlans

SPARE = 2  # times the memory that all sequences would fill in bf16
FORCED_TOGETHER = AGES.cell_tokens // BLOCK_SIZE  # sequences, each with a block of its text

Take = Callable[[int, torch.Tensor], None]  # position, logits [num_sequences, vocab_size]


class Plans(Protocol):
    def open(self, token_ids: Items[int]) -> Sequence: ...
    def close(self, sequence: Sequence) -> None: ...
    def plan(self, *chunks: tuple[Sequence, int]) -> ScheduledBatch: ...
    def book(self, batch: ScheduledBatch) -> None: ...


class KeepingSampler(Sampler):
    """Shows the logits that it was given last, which the next step overwrites."""

    logits: torch.Tensor

    def draw(self, logits: torch.Tensor, *others: Any) -> DrawnTokens:
        self.logits = logits
        return super().draw(logits, *others)


class Session:
    """Prompts are computed one after the other, in cells; then all sequences decode together, each
    step launched while the one before it computes. Forced texts of the exact cache go on by whole
    blocks instead: what is aged for a token depends on its block alone."""

    def __init__(self, runner: ModelRunner, max_model_len: int, *, by_blocks: bool = False) -> None:
        """`by_blocks`: of the exact cache."""
        self.head_dim = runner.model_config.head_dim
        self.vocab_size = runner.model_config.vocab_size
        self._runner = runner
        self._sampler = runner._sampler = KeepingSampler()
        self._by_blocks = by_blocks
        self._ages: EmulatedAges | None = None
        self._plans: Plans
        if runner.tier_groups:
            self._plans = TieredPlans(runner.tier_groups)
        else:
            self._plans = PagedPlans(runner.num_blocks, runner.block_size, max_model_len)
            self._ages = EmulatedAges(runner._paged)

    @torch.inference_mode()
    def force(
        self,
        texts: Items[Items[int]],
        emulated: Items[Emulated | None],
        num_prompt: int,
        take: Take,
    ) -> None:
        """Of texts of one length: `take` what is said after each token from the last of the
        `num_prompt` first on, but for the last of all. `emulated`: of each."""
        with self._open([text[:num_prompt] for text in texts], emulated) as sequences:
            first = [self._prefill(sequence) for sequence in sequences]
            take(num_prompt - 1, torch.cat([logits for logits, _ in first]))
            if self._ages is not None and self._by_blocks:
                self._force_blocks(sequences, texts, take)
            else:
                self._force_tokens(sequences, texts, take)

    def _force_tokens(
        self, sequences: Items[Sequence], texts: Items[Items[int]], take: Take
    ) -> None:
        before: PendingTokens | None = None
        for position in range(sequences[0].num_prompt_tokens, len(texts[0]) - 1):
            for sequence, text in zip(sequences, texts, strict=True):
                sequence.token_ids.append(text[position])
            pending = self._launch(*((sequence, 1) for sequence in sequences))
            take(position, self._sampler.logits)
            if before is not None:
                before()
            before = pending

    def _force_blocks(
        self, sequences: Items[Sequence], texts: Items[Items[int]], take: Take
    ) -> None:
        num_forced = len(texts[0]) - 1
        for start in range(sequences[0].num_prompt_tokens, num_forced, BLOCK_SIZE):
            end = min(start + BLOCK_SIZE, num_forced)
            for sequence, text in zip(sequences, texts, strict=True):
                sequence.token_ids += text[start:end]
            together = range(0, len(sequences), FORCED_TOGETHER)
            logits = torch.cat(
                [
                    self._all_logits(sequences[first : first + FORCED_TOGETHER], end - start)
                    for first in together
                ]
            )
            for index in range(end - start):
                take(start + index, logits[:, index])

    def _all_logits(self, sequences: Items[Sequence], num_tokens: int) -> torch.Tensor:
        """[num_sequences, num_tokens, vocab_size], after each of the next `num_tokens` tokens."""
        batch = self._plans.plan(*((sequence, num_tokens) for sequence in sequences))
        assert self._ages is not None
        self._ages.advance(batch)
        logits = logits_of_all(self._runner, batch)
        self._plans.book(batch)
        return logits.view(len(sequences), num_tokens, -1)

    @torch.inference_mode()
    def complete(self, prompts: Items[Items[int]], num_tokens: int) -> list[list[int]]:
        """Greedy, `num_tokens` for each."""
        with self._open(prompts, [None] * len(prompts)) as sequences:
            for sequence in sequences:
                sequence.token_ids.append(self._prefill(sequence)[1])
            for _ in range(num_tokens - 1):
                sampled = self._launch(*((sequence, 1) for sequence in sequences))()
                for sequence, token_id in zip(sequences, sampled.token_ids, strict=True):
                    sequence.token_ids.append(token_id)
            return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]

    @contextmanager
    def _open(
        self, prompts: Items[Items[int]], emulated: Items[Emulated | None]
    ) -> Iterator[list[Sequence]]:
        sequences = []
        for prompt, of_prompt in zip(prompts, emulated, strict=True):
            sequences.append(self._plans.open(prompt))
            if of_prompt is not None:
                assert self._ages is not None, "formats are emulated in the exact cache"
                self._ages.put(sequences[-1], of_prompt)
        yield sequences
        for sequence in sequences:
            self._plans.close(sequence)
            if self._ages is not None:
                self._ages.forget(sequence)

    def _prefill(self, sequence: Sequence) -> tuple[torch.Tensor, int]:
        """Logits [1, vocab_size] after the prompt, and the likeliest token."""
        cell = AGES.cell_tokens
        while True:
            start, end = sequence.num_computed_tokens, sequence.num_prompt_tokens
            num_tokens = min(end - start, cell - start % cell)
            pending = self._launch((sequence, num_tokens))
            if start + num_tokens == end:
                logits = self._sampler.logits.clone()
                return logits, pending().token_ids[0]

    def _launch(self, *chunks: tuple[Sequence, int]) -> PendingTokens:
        batch = self._plans.plan(*chunks)
        if self._ages is not None:
            self._ages.advance(batch)
        pending = self._runner.launch(batch)
        self._plans.book(batch)
        return pending


def open_session(
    model: Path,
    device: str,
    cache: Cache,
    num_sequences: int,
    max_model_len: int,
    num_threads: int,
) -> Session:
    """Raises what building an engine raises. On a CPU always in float32, which is what it serves
    in."""
    gc.collect()
    is_on_gpu = device.startswith("cuda")
    if is_on_gpu:
        torch.cuda.empty_cache()
    dtype = cache.dtype if is_on_gpu else "float32"
    blocks_each = -(-max_model_len // BLOCK_SIZE)
    of_block = block_bytes(ModelConfig.from_folder(model), BLOCK_SIZE, getattr(torch, dtype))
    config = EngineConfig(
        model,
        device=device,
        dtype=dtype,
        attention_backend="triton" if is_on_gpu and dtype == "float32" else "auto",
        deterministic=cache.is_deterministic,
        max_model_len=max_model_len,
        num_threads=num_threads,
        cache=CacheConfig(SPARE * num_sequences * blocks_each * of_block, tiers=cache.tiers),
        scheduler=SchedulerConfig(num_sequences, max(AGES.cell_tokens, num_sequences)),
    )
    return Session(build_model_runner(config), max_model_len, by_blocks=cache.is_emulated)


def logits_of_all(runner: ModelRunner, batch: ScheduledBatch) -> torch.Tensor:
    """[num_tokens, vocab_size] float32: of each token of `batch`, where a step has those of the
    last of a chunk alone."""
    inputs = runner._backend.build_inputs(batch)
    rows = torch.arange(len(inputs.input_ids), device=inputs.input_ids.device)
    inputs = replace(inputs, sampled_rows=rows)
    attend = partial(runner._backend.attend, metadata=runner._backend.prepare(inputs))
    decoder = runner._decoder
    return decoder.logits(decoder.forward(inputs.input_ids, inputs.positions, attend, rows))
