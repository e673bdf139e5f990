"""What the benchmarks touch of vLLM, without a model: on PYTHONPATH it is taken for the real one.

A step gives every request a token. Who steps a prompt of HANGING_PROMPT_TOKENS waits for ever; one
of BREAKING_PROMPT_TOKENS raises, and whoever steps it after that waits as well.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.0.fake"
BLOCK_SIZE = 16
HANGING_PROMPT_TOKENS = 77
BREAKING_PROMPT_TOKENS = 78
STEP_S = 2e-3


class LLM:
    def __init__(self, **options) -> None:
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        config = json.loads(Path(options["model"], "config.json").read_text())
        token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"]
        token_bytes *= config["head_dim"]
        num_blocks = options["kv_cache_memory_bytes"] // token_bytes // BLOCK_SIZE
        self.llm_engine = LLMEngine(config["vocab_size"], num_blocks)


class LLMEngine:
    def __init__(self, vocab_size: int, num_blocks: int) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: vocab_size),
            cache_config=SimpleNamespace(num_gpu_blocks=num_blocks, block_size=BLOCK_SIZE),
            compilation_config=SimpleNamespace(cudagraph_mode="FULL_AND_PIECEWISE"),
            scheduler_config=SimpleNamespace(async_scheduling=True),
        )
        self._waiting: dict[str, tuple[list[int], SamplingParams]] = {}
        self._left: dict[str, int] = {}
        self._num_cached: dict[str, int] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._is_broken = False

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._left)

    def add_request(self, request_id: str, prompt: dict, params: SamplingParams) -> None:
        self._waiting[request_id] = (prompt["prompt_token_ids"], params)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._left.pop(request_id, None)

    def step(self) -> list[SimpleNamespace]:
        time.sleep(STEP_S)
        if self._waiting:
            for request_id, (prompt, params) in self._waiting.items():
                while len(prompt) == HANGING_PROMPT_TOKENS or self._is_broken:
                    time.sleep(1)
                if len(prompt) == BREAKING_PROMPT_TOKENS:
                    self._is_broken = True
                    raise RuntimeError("the engine broke")
                self._left[request_id] = params.options["max_tokens"]
                is_seen = tuple(prompt) in self._seen
                self._num_cached[request_id] = len(prompt) // BLOCK_SIZE * BLOCK_SIZE * is_seen
                self._seen.add(tuple(prompt))
            self._waiting.clear()
        outputs = [
            SimpleNamespace(
                request_id=request_id,
                outputs=[SimpleNamespace(token_ids=[7])],
                num_cached_tokens=self._num_cached[request_id],
            )
            for request_id in self._left
        ]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        return outputs
