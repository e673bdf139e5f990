"""The two that are measured: token ids in, greedy token ids out, float32, one thread."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.sampling_params import SamplingParams

NUM_THREADS = 1


class Contestant(Protocol):
    name: str

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> list[list[int]]:
        """Exactly `num_new_tokens` for each prompt, all prompts in one batch."""


class FlashEngine:
    """No prefix cache: a repeat computes its prompt again, as the peer does."""

    name = "flashray"

    def __init__(self, model_path: Path, max_batch: int) -> None:
        self._engine = build_engine(
            EngineConfig(
                model_path,
                dtype="float32",
                max_model_len=1024,
                num_threads=NUM_THREADS,
                cache=CacheConfig(kv_cache_bytes=512 << 20, enable_prefix_cache=False),
                scheduler=SchedulerConfig(max_batch, max_num_batched_tokens=1024),
            )
        )

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            self._engine.add(str(index), prompt, SamplingParams(num_new_tokens, temperature=0.0))
        completions: list[list[int]] = [[] for _ in prompts]
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                completions[int(output.seq_id)] += output.token_ids
        return completions


class HuggingFace:
    name = "transformers generate"

    def __init__(self, model_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(NUM_THREADS)
        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None  # the same number of tokens from both

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts)  # [num_prompts, num_prompt_tokens]
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        completions: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
        return completions
