"""One request through an engine of its own, which records what its attention looks at."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engine.build import build_engine_around, build_model_runner, resolve_max_model_len
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import EngineError
from engine.execution.attention_trace import AttentionTrace
from engine.models.model_config import ModelConfig
from engine.sampling_params import SamplingParams

UNBOUNDED_BYTES = 1 << 50  # what one sequence needs is a bound already
LEAST_ROOM = 640  # tokens: arenas for less have no slabs for what moves on


def num_steps(num_prompt_tokens: int, num_tokens: int, config: EngineConfig) -> int:
    """That `trace_attention` takes: the last chunk of the prompt gives the first token."""
    return -(-num_prompt_tokens // config.scheduler.max_num_batched_tokens) + num_tokens - 1


def trace_attention(
    config: EngineConfig,
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> AttentionTrace:
    """`num_tokens` greedy tokens, whatever they are. How much room the engine has is set here, and
    that it has no graphs. `progress` is called after each step. Raises what `build_engine` raises,
    PromptTooLong, InvalidSequence, and EngineError for numbers that are not finite."""
    config = _for_one(config, len(prompt_token_ids) + num_tokens)
    runner, tracing = build_model_runner(config).traced()
    engine = build_engine_around(runner, config)
    engine.add("traced", prompt_token_ids, SamplingParams(max_tokens=num_tokens, temperature=0.0))
    token_ids: list[int] = []
    while engine.has_work:
        for output in engine.step().outputs:
            token_ids += output.token_ids
        progress()
    if not all(np.isfinite(step.masses).all() for step in tracing.steps):
        raise EngineError(
            "what attention gives is not finite on this text; "
            "verify the model's files: flashray doctor"
        )
    return AttentionTrace(
        len(prompt_token_ids), tuple(token_ids), tracing.layer_groups, tuple(tracing.steps)
    )


def _for_one(config: EngineConfig, num_tokens: int) -> EngineConfig:
    context = resolve_max_model_len(config, ModelConfig.from_folder(config.model_path))
    return replace(
        config,
        max_model_len=min(max(num_tokens, LEAST_ROOM), context),
        enforce_eager=True,
        async_scheduling=False,
        cache=replace(config.cache, kv_cache_bytes=UNBOUNDED_BYTES, enable_prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_sequences=1,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        ),
    )
