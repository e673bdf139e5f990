"""vLLM, timed at LLMEngine.step(), its engine core in a process of its own as by default."""

from collections.abc import Sequence

import vllm
from vllm import LLM
from vllm.sampling_params import RequestOutputKind, SamplingParams

from benchmarks.engine.job import Job
from benchmarks.engine.stepped import Progressed

CAPTURED_BATCHES = (1, 2, 4, 8, 16, 32, 64)


class SteppedVllm:
    def __init__(self, job: Job) -> None:
        self.name = f"vllm {vllm.__version__}"
        llm = LLM(
            model=job.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=job.dtype,
            max_model_len=job.max_model_len,
            kv_cache_memory_bytes=job.kv_cache_bytes,
            kv_cache_dtype=job.kv_cache_dtype,
            max_num_seqs=job.max_num_sequences,
            max_num_batched_tokens=job.max_num_batched_tokens,
            enable_prefix_caching=True,
            seed=0,
            disable_log_stats=True,
            compilation_config={"cudagraph_capture_sizes": list(CAPTURED_BATCHES)},
        )
        self._engine = llm.llm_engine
        config = self._engine.vllm_config
        self.vocab_size = config.model_config.get_vocab_size()
        num_blocks, block_size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        self.facts: dict[str, object] = {
            "cached_tokens": num_blocks * block_size if num_blocks else None,
            "block_size": block_size,
            "cuda_graphs": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": config.scheduler_config.async_scheduling,
            "kv_cache_dtype": job.kv_cache_dtype,
        }

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, request_id: str, prompt: list[int], num_new_tokens: int) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[Progressed]:
        return [
            Progressed(
                output.request_id, len(output.outputs[0].token_ids), output.num_cached_tokens or 0
            )
            for output in self._engine.step()
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))
