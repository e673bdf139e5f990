"""The engine on a GPU says what the float32 engine says on a CPU: the gate of every number.

    python -m benchmarks.engine.parity --model FOLDER --make-reference FILE     once, on a CPU
    python -m benchmarks.engine.parity --model FOLDER --reference FILE --sha SHA --out PARITY.json
    python -m benchmarks.engine.parity --small      a small random model, float32, no files

Greedy tokens are equal, but for ties: there the reference prefers its own token by less than the
measured error of the logits. After a tie the prompt goes on with the reference's token.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.command import Progress
from benchmarks.engine.gpu_process import GpuProcesses, end_with_parent
from benchmarks.engine.parity_reference import (
    NUM_NEW_TOKENS,
    Completion,
    Reference,
    complete,
    make_reference,
    start_engine,
    text_prompts,
)
from benchmarks.errors import BenchmarkError, GateRed, MeasurementFailed

MAX_TIE_SHARE = 0.02
MAX_RELATIVE_ERROR = 2e-2
MAX_SMALL_RELATIVE_ERROR = 1e-4  # in float32
SMALL_LENGTHS = (1, 5, 63, 64, 65, 130, 300, 700, 1500)
GATE_TIMEOUT_S = 300

Generate = Callable[[Sequence[list[int]], Sequence[int]], list[Completion]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a run that is another. `preference`: by how much the reference likes its
    own token better, in log probability; None: the other is not among its likeliest."""

    num_prompt_tokens: int
    step: int
    expected: int
    came: int
    preference: float | None


@dataclass(frozen=True, slots=True)
class Parity:
    """`max_error`: of the log probabilities of the reference's likeliest tokens. `relative_error`:
    of the logits about their mean, over tokens drawn evenly from the vocabulary."""

    num_prompts: int
    longest_prompt: int
    num_tokens: int
    max_error: float
    relative_error: float
    differences: tuple[Difference, ...]
    max_relative_error: float = MAX_RELATIVE_ERROR

    @property
    def wrong(self) -> tuple[Difference, ...]:
        return tuple(
            each
            for each in self.differences
            if each.preference is None or each.preference >= self.max_error
        )

    @property
    def passed(self) -> bool:
        return (
            not self.wrong
            and len(self.differences) <= MAX_TIE_SHARE * self.num_tokens
            and self.relative_error <= self.max_relative_error
        )

    def __str__(self) -> str:
        num_ties = len(self.differences) - len(self.wrong)
        return (
            f"{self.num_tokens} tokens of {self.num_prompts} prompts of up to "
            f"{self.longest_prompt}: {num_ties} ties (at most {MAX_TIE_SHARE:.0%}), "
            f"{len(self.wrong)} wrong; the likeliest off by {self.max_error:.3g}, all logits by "
            f"{self.relative_error:.2e} (at most {self.max_relative_error:.0e}): "
            f"{'passed' if self.passed else 'FAILED'}"
        )


def require_parity(
    file: Path | None, sha: str, processes: GpuProcesses, progress: Progress
) -> None:
    """Without a file of this commit the small model is tried, in a process of its own. Raises
    GateRed."""
    if file is not None:
        written = json.loads(file.read_text())
        if written["sha"] != sha or not written["passed"]:
            raise GateRed(
                f"expected {file} of commit {sha}, passed; it is of {written['sha']}, "
                f"{'passed' if written['passed'] else 'failed'}"
            )
        return
    status = processes.run("benchmarks.engine.parity", ["--small"], GATE_TIMEOUT_S)
    if status != 0:
        ended = f"was ended within {GATE_TIMEOUT_S} s" if status is None else f"ended with {status}"
        raise GateRed(f"no numbers without right tokens: benchmarks.engine.parity --small {ended}")
    progress("parity of the small model: passed")


def compare(reference: Reference, generate: Generate, generate_probed: Generate) -> Parity:
    """`generate` is what is served; `generate_probed` shows log probabilities as well. Raises
    MeasurementFailed when these are no numbers."""
    max_error, relative_error = _errors(reference, generate_probed)
    return Parity(
        len(reference.prompts),
        max(map(len, reference.prompts)),
        sum(map(len, reference.tokens)),
        max_error,
        relative_error,
        tuple(_differences(reference, generate)),
    )


def _errors(reference: Reference, generate: Generate) -> tuple[float, float]:
    """(largest of the likeliest tokens, relative of the probes) over the steps whose tokens before
    are the reference's."""
    lengths = [len(tokens) for tokens in reference.tokens]
    largest: list[float] = []
    squares = torch.zeros(2, dtype=torch.float64)  # of errors, of the logits
    for index, completion in enumerate(generate(reference.prompts, lengths)):
        for step, top in enumerate(completion.tops):
            if completion.token_ids[:step] != reference.tokens[index][:step]:
                break
            came, likeliest = dict(top), reference.tops[index][step]
            largest += [abs(came[each] - value) for each, value in likeliest if each in came]
            squares += _squares(completion.probed[step], reference.probed[index][step])
    if not largest or not squares.isfinite().all():
        raise MeasurementFailed(
            f"expected finite log probabilities of the reference's likeliest tokens, got "
            f"{len(largest)}, and sums of squares {squares.tolist()}"
        )
    return max(largest), math.sqrt(squares[0] / squares[1])


def _squares(came: Sequence[float], expected: Sequence[float]) -> torch.Tensor:
    """Sums over the probes, about the mean: a shift of all logits is no error, and log
    probabilities hold one."""
    one, other = (torch.tensor(each, dtype=torch.float64) for each in (came, expected))
    error, logits = one - one.mean() - other + other.mean(), other - other.mean()
    return torch.stack((error.square().sum(), logits.square().sum()))


def _differences(reference: Reference, generate: Generate) -> list[Difference]:
    """All prompts at once; those with a difference again, from after it, until none is left."""
    starts = dict.fromkeys(range(len(reference.prompts)), 0)
    differences = []
    while starts:
        indices = list(starts)
        completions = generate(
            [reference.prompts[i] + reference.tokens[i][: starts[i]] for i in indices],
            [len(reference.tokens[i]) - starts[i] for i in indices],
        )
        for index, completion in zip(indices, completions, strict=True):
            start = starts.pop(index)
            expected = reference.tokens[index][start:]
            assert len(completion.token_ids) == len(expected), "the engine gives what is asked for"
            pairs = enumerate(zip(expected, completion.token_ids, strict=True), start)
            step = next((step for step, (one, other) in pairs if one != other), None)
            if step is None:
                continue
            differences.append(
                _difference(reference, index, step, completion.token_ids[step - start])
            )
            if step + 1 < len(reference.tokens[index]):
                starts[index] = step + 1
    return differences


def _difference(reference: Reference, index: int, step: int, came: int) -> Difference:
    expected = reference.tokens[index][step]
    top = dict(reference.tops[index][step])
    preference = top[expected] - top[came] if came in top else None
    return Difference(len(reference.prompts[index]), step, expected, came, preference)


def check(
    model: Path, reference: Reference, device: str, dtype: str, num_threads: int, **limits: int
) -> Parity:
    engine = start_engine(model, device, dtype, num_threads, **limits)
    return compare(
        reference,
        lambda prompts, counts: complete(engine, prompts, counts),
        lambda prompts, counts: complete(engine, prompts, counts, reference.probes),
    )


def check_small(device: str, num_threads: int, progress: Progress) -> Parity:
    """A random Llama of four layers in float32, made and referred to here and now."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        eos_token_id=0,
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, config.vocab_size, (length,), generator=generator).tolist()
        for length in SMALL_LENGTHS
    ]
    limits = {"max_model_len": 2048, "kv_cache_bytes": 1 << 30}
    with tempfile.TemporaryDirectory(prefix="flashray-parity-") as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        model = Path(folder)
        reference = make_reference(model, prompts, num_threads, progress, **limits)
        parity = check(model, reference, device, "float32", num_threads, **limits)
        return replace(parity, max_relative_error=MAX_SMALL_RELATIVE_ERROR)


def main() -> int:
    end_with_parent()
    arguments = _arguments()
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    threads = arguments.threads
    try:
        if arguments.make_reference is not None:
            prompts = text_prompts(arguments.model)
            made = make_reference(arguments.model, prompts, threads, progress)
            made.write(arguments.make_reference)
            return 0
        if arguments.small:
            parity = check_small(arguments.device, threads, progress)
        else:
            reference = Reference.read(arguments.reference, arguments.model)
            progress(f"{len(reference.prompts)} prompts on {arguments.device}")
            parity = check(arguments.model, reference, arguments.device, arguments.dtype, threads)
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    print(parity)
    if arguments.out is not None:
        _write(arguments, parity)
    return 0 if parity.passed else 1


def _write(arguments: argparse.Namespace, parity: Parity) -> None:
    on_gpu = arguments.device.startswith("cuda")
    content = {
        "sha": arguments.sha,
        "passed": parity.passed,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "torch": torch.__version__,
        "num_new_tokens": NUM_NEW_TOKENS,
        "max_tie_share": MAX_TIE_SHARE,
        **asdict(parity),
        "wrong": [asdict(each) for each in parity.wrong],
    }
    arguments.out.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.parity", description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder with safetensors")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--make-reference", type=Path, metavar="FILE", help="on a CPU, and write it")
    task.add_argument("--reference", type=Path, metavar="FILE", help="hold the engine against it")
    task.add_argument("--small", action="store_true", help="a small random model, in float32")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=4, help="of torch on a CPU")
    parser.add_argument("--sha", help="the commit that is tried; goes into the file")
    parser.add_argument("--out", type=Path, help="write what came, as JSON")
    arguments = parser.parse_args()
    if arguments.model is None and not arguments.small:
        parser.error("--model names the folder of the model")
    if arguments.out is not None and arguments.sha is None:
        parser.error("--out needs --sha")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
