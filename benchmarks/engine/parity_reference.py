"""What the engine must say: greedy tokens of the float32 engine on a CPU, their likeliest rivals,
and logits. Made once, kept in a file of a few MB, so that a GPU waits for no CPU."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.command import Progress
from benchmarks.engine.prompts import TEXT
from benchmarks.errors import MeasurementFailed
from engine.build import build_engine, weights_sha256
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams

NUM_NEW_TOKENS = 32
NUM_TOP = 20
NUM_PROBES = 256
MAX_REFERENCE_ERROR = 1e-2  # logits of transformers and of our own float32 engine
OPENINGS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "SELECT name FROM users WHERE",
    "The three primary colours are red,",
    "In 1969, the first humans",
    "My favourite recipe starts with two eggs and",
    "E = mc^2 means that",
    "To be, or not to be, that is",
    "El perro corre por el parque y",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nList three European rivers.<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam, I am writing to",
    TEXT,
)
# Around the edges of blocks of 64; the longest with its answer fills the context of 8,192.
LONG_LENGTHS = (63, 64, 65, 300, 1023, 2000, 4096, 8192 - NUM_NEW_TOKENS)

Top = list[tuple[int, float]]  # (token id, log probability), likeliest first


@dataclass(frozen=True, slots=True)
class Reference:
    """`tops` and `probed` are [prompt][step]; `probed` has the log probabilities of the tokens
    `probes`, which are drawn evenly from the vocabulary: a small picture of all logits."""

    weights_sha256: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    tops: list[list[Top]]
    probes: list[int]
    probed: list[list[list[float]]]

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), separators=(",", ":")))

    @classmethod
    def read(cls, file: Path, model: Path) -> Self:
        """Raises MeasurementFailed when it was made from other weights."""
        reference = cls(**json.loads(file.read_text()))
        if reference.weights_sha256 != (found := weights_sha256(model)):
            raise MeasurementFailed(
                f"{file} was made from weights {reference.weights_sha256}, {model} has {found}; "
                "make it again with --make-reference"
            )
        return reference


@dataclass(frozen=True, slots=True)
class Completion:
    """`tops` and `probed` as in Reference, empty unless asked for."""

    token_ids: list[int]
    tops: list[Top]
    probed: list[list[float]]


def text_prompts(model: Path) -> list[list[int]]:
    """Of the model's tokenizer: short openings, and one log book cut at many lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    log = tokenizer.encode(_log_book(500)).ids
    assert len(log) >= max(LONG_LENGTHS), "the log book is long enough"
    return [
        *(tokenizer.encode(text).ids for text in OPENINGS),
        *(log[:length] for length in LONG_LENGTHS),
    ]


def start_engine(model: Path, device: str, dtype: str, num_threads: int, **limits: int) -> Engine:
    sizes = {"max_model_len": 8192, "kv_cache_bytes": 4 << 30, "max_num_sequences": 32} | limits
    return build_engine(
        EngineConfig(
            model,
            device=device,
            dtype=dtype,
            max_model_len=sizes["max_model_len"],
            num_threads=num_threads,
            cache=CacheConfig(sizes["kv_cache_bytes"]),
            scheduler=SchedulerConfig(sizes["max_num_sequences"], max_num_batched_tokens=2048),
        )
    )


def complete(
    engine: Engine,
    prompts: Sequence[list[int]],
    num_tokens: Sequence[int],
    probes: Sequence[int] | None = None,
) -> list[Completion]:
    """Greedy, all at once, `num_tokens[i]` for each. With `probes` their log probabilities too."""
    completions = [Completion([], [], []) for _ in prompts]
    for index, (prompt, count) in enumerate(zip(prompts, num_tokens, strict=True)):
        params = SamplingParams(count, temperature=0.0)
        if probes is not None:
            # More than a caller may ask for: all of them, as an even draw lies anywhere.
            object.__setattr__(params, "num_logprobs", engine._vocab_size)
        engine.add(str(index), prompt, params)
    while engine.has_work:
        for output in engine.step().outputs:
            completion = completions[int(output.seq_id)]
            completion.token_ids.extend(output.token_ids)
            for logprobs in output.logprobs:
                by_token = dict(logprobs.top)
                completion.tops.append(_rounded(logprobs.top[:NUM_TOP]))
                completion.probed.append(
                    [round(by_token[token_id], 5) for token_id in probes or ()]
                )
    return completions


def make_reference(
    model: Path, prompts: Sequence[list[int]], num_threads: int, progress: Progress, **limits: int
) -> Reference:
    """Minutes for prompts of 8K tokens. Raises MeasurementFailed when transformers' logits are
    other ones: then the reference is wrong."""
    engine = start_engine(model, "cpu", "float32", num_threads, **limits)
    vocabulary = range(engine._vocab_size)
    probes = sorted(random.Random(1).sample(vocabulary, min(NUM_PROBES, len(vocabulary))))
    completions = []
    for prompt in prompts:
        completions += complete(engine, [prompt], [NUM_NEW_TOKENS], probes)
        progress(f"{len(prompt)} tokens: {completions[-1].token_ids[:8]} ...")
    reference = Reference(
        weights_sha256(model),
        list(prompts),
        [each.token_ids for each in completions],
        [each.tops for each in completions],
        probes,
        [each.probed for each in completions],
    )
    _hold_against_transformers(model, reference, progress)
    return reference


@torch.inference_mode()
def _hold_against_transformers(model: Path, reference: Reference, progress: Progress) -> None:
    from transformers import AutoModelForCausalLM

    peer: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = zip(reference.prompts, reference.tokens, reference.probed, strict=True)
    for prompt, tokens, probed in rows:
        input_ids = torch.tensor([prompt + tokens[:-1]])
        logprobs = peer(input_ids, logits_to_keep=len(tokens)).logits[0].log_softmax(-1)
        worst = (logprobs[:, reference.probes] - torch.tensor(probed)).abs().max()
        progress(f"{len(prompt)} tokens: transformers' logits within {worst:.2g}")
        if not worst <= MAX_REFERENCE_ERROR:
            raise MeasurementFailed(
                f"expected transformers' logits within {MAX_REFERENCE_ERROR:g} of our float32 "
                f"engine's, a prompt of {len(prompt)} tokens differs by {worst:.3g}"
            )


def _rounded(top: Sequence[tuple[int, float]]) -> Top:
    return [(token_id, round(logprob, 5)) for token_id, logprob in top]


def _log_book(num_days: int) -> str:
    """Prose of about 25 tokens a day that no two days share."""
    places = ("the harbour", "a quiet bay", "the northern cape", "an island", "open water")
    skies = ("a clear sky", "heavy rain", "thick fog")
    days = (
        f"On day {day} the ship sailed {day * 37 % 91} miles and reached {places[day % 5]} "
        f"under {skies[day % 3]}."
        for day in range(1, num_days + 1)
    )
    return " ".join(days)
