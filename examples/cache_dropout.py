"""Fine-tune a model to bear what its tiered KV cache loses: `python -m examples.cache_dropout`.

For each `--format` the attention of SmolLM2 (or of the model in the folder `--model`) is trained
under cache dropout, by default on what the model itself, as it came, says about the same text with
its exact cache. A second pass of each step, exact, holds it to the same answers (`--anchor`). Then,
on text that it was not trained on, a table: what full precision loses and what the tiers cost,
before and after. Prose is the help of Python's own language; code, never trained on, is from its
standard library.
"""

import argparse
import copy
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.results import ROOT, Row, cpu_name, describe_tree
from engine.cache.formats import COLD_FORMATS
from engine.cache.tier_config import TierConfig
from engine.models.cache_dropout import cache_dropout

DROP = "drop"  # the cold tier is not seen at all
CODE_MODULES = ("dataclasses", "typing")
TRAINED_SHARE = 0.8  # of the prose
SEGMENT = 128  # neighbouring tokens that the bootstrap draws together
NUM_RESAMPLES = 10_000
MAX_NORM = 1.0
WARM_UP_STEPS = 5
PACKAGES = ("torch", "transformers", "numpy")
COLUMNS = "{:<13}{:<23}{:>10}{:>10}  {:<24}"

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Scores(NamedTuple):
    """Of one model on a text, a number for each scored token: loss at full precision in nats, what
    the tiers change, KL(full || tiered), and KL from the model as it came to the tiered one, in
    nats; whether full and tiered have the same top token. [num_tokens] float64."""

    nll: np.ndarray
    kl: np.ndarray
    kl_from_start: np.ndarray
    same_top: np.ndarray


class Metric(NamedTuple):
    name: str
    unit: str
    better: str
    says: str


METRICS = (
    Metric("nll", "nats", "lower", "loss, full precision"),
    Metric("kl", "nats", "lower", "KL(full || tiered)"),
    Metric("kl_from_start", "nats", "lower", "KL(start || tiered)"),
    Metric("same_top", "share", "higher", "same top token"),
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids: prose to train on, and windows of `context` tokens of other text by name."""

    train: torch.Tensor
    held_out: dict[str, list[torch.Tensor]]


def main() -> int:
    arguments = parse()
    sha = arguments.sha or describe_tree(ROOT)  # now: the tree may change meanwhile
    device = torch.device(arguments.device)
    folder = arguments.model or built_in_model()
    start = load(folder, device)
    texts = read_texts(folder, arguments.context, arguments.windows, device)
    rows: list[dict[str, object]] = []
    for name in arguments.format:
        tuned, tiers = copy.deepcopy(start), tiers_of(arguments, name)
        fine_tune(tuned, start, tiers, texts.train, arguments)
        for text, windows in texts.held_out.items():
            before, after = score(start, tuned, windows, tiers)
            rows += rows_of(f"{name}, {text}", before, after, arguments.seed)
    print_table(rows)
    if arguments.out is not None:
        write(arguments.out, sha, device, rows)
        say(f"wrote {arguments.out}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.cache_dropout", description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder; by default the built-in SmolLM2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--format", nargs="+", choices=(*COLD_FORMATS, DROP), default=["int4"])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--hot", type=int, default=128, help="tokens")
    parser.add_argument("--warm", type=int, default=128, help="tokens")
    parser.add_argument("--steps", type=int, default=40, help="of one window each")
    parser.add_argument("--windows", type=int, default=8, help="of each held-out text, at most")
    parser.add_argument("--probability", type=float, default=1.0, help="of layers that age")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--loss", choices=LOSSES, default="distil", help="under cache dropout")
    parser.add_argument(
        "--anchor", type=float, default=1.0, help="weight of KL(start || full), 0: no such pass"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sha", help="the commit that is run, where there is no git")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class Tiers(NamedTuple):
    config: TierConfig
    hide_cold: bool

    def aged(self, model: Any, probability: float = 1.0) -> AbstractContextManager[None]:
        return cache_dropout(model, self.config, probability=probability, hide_cold=self.hide_cold)

    @property
    def first_scored(self) -> int:
        """The first token that has a cold block behind it."""
        config = self.config
        return config.sink_tokens + config.block_size + config.warm_tokens + config.hot_tokens


def tiers_of(arguments: argparse.Namespace, name: str) -> Tiers:
    cold_format = "int4" if name == DROP else name
    config = TierConfig(
        hot_tokens=arguments.hot, warm_tokens=arguments.warm, cold_format=cold_format
    )
    return Tiers(config, hide_cold=name == DROP)


def built_in_model() -> Path:
    from deployments.model_files import BUILT_IN_MODEL, prepare_model

    return prepare_model(BUILT_IN_MODEL, progress=say).path


def load(folder: Path, device: torch.device) -> Any:
    """In float32, whose own rounding hides nothing; only attention's projections take gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    return model.eval()


def read_texts(folder: Path, context: int, num_windows: int, device: torch.device) -> Texts:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    topics = import_module("pydoc_data.topics").topics
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    code = "\n\n".join(inspect.getsource(import_module(name)) for name in CODE_MODULES)
    prose_ids, code_ids = (
        torch.tensor(tokenizer.encode(each).ids, device=device) for each in (prose, code)
    )
    num_trained = int(TRAINED_SHARE * len(prose_ids))
    held_out = {"prose": prose_ids[num_trained:], "code": code_ids}
    return Texts(
        prose_ids[:num_trained],
        {
            name: [each for each in ids.split(context) if len(each) == context][:num_windows]
            for name, ids in held_out.items()
        },
    )


def logits_of(model: Any, window: torch.Tensor) -> torch.Tensor:
    """[num_tokens, vocabulary]."""
    logits: torch.Tensor = model(window[None], use_cache=False).logits[0]
    return logits


def kl_divergence(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """KL(logits || others), [num_tokens] nats."""
    logs, other_logs = logits.log_softmax(-1), others.log_softmax(-1)
    return (logs.exp() * (logs - other_logs)).sum(-1)


def distil(logits: torch.Tensor, of_start: torch.Tensor, _window: torch.Tensor) -> torch.Tensor:
    return kl_divergence(of_start, logits).mean()


def next_token(logits: torch.Tensor, _of_start: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], window[1:])


LOSSES: dict[str, Loss] = {"distil": distil, "next-token": next_token}


def fine_tune(
    model: Any, start: Any, tiers: Tiers, train: torch.Tensor, arguments: argparse.Namespace
) -> None:
    """Changes `model`. The loss is over the tokens that have a cold block behind them."""
    torch.manual_seed(arguments.seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    first, started_s = tiers.first_scored, time.monotonic()
    for step in range(arguments.steps):
        offset = int(torch.randint(len(train) - arguments.context, ()))
        window = train[offset : offset + arguments.context]
        with torch.no_grad():
            of_start = logits_of(start, window)[first:]
        with tiers.aged(model, arguments.probability):
            logits = logits_of(model, window)[first:]
        loss = LOSSES[arguments.loss](logits, of_start, window[first:])
        loss.backward()
        if arguments.anchor:
            kept = distil(logits_of(model, window)[first:], of_start, window)
            (arguments.anchor * kept).backward()
        torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * share_of_rate(step, arguments.steps)
        optimizer.step()
        optimizer.zero_grad()
        left_s = (time.monotonic() - started_s) / (step + 1) * (arguments.steps - step - 1)
        say(f"step {step + 1}/{arguments.steps}: loss {loss.item():.5f}, {left_s:.0f} s left")


def share_of_rate(step: int, num_steps: int) -> float:
    """Up in a few steps, and down along a cosine."""
    up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return up * 0.5 * (1 + math.cos(math.pi * step / num_steps))


@torch.inference_mode()
def score(
    start: Any, tuned: Any, windows: Sequence[torch.Tensor], tiers: Tiers
) -> tuple[Scores, Scores]:
    """Of both models. Windows are read apart, and scored from the first token on that has a cold
    block behind it."""
    found: tuple[list[Scores], list[Scores]] = ([], [])
    for index, window in enumerate(windows):
        scored, targets = slice(tiers.first_scored, -1), window[tiers.first_scored + 1 :]
        of_start = logits_of(start, window)[scored]
        for model, scores in zip((start, tuned), found, strict=True):
            full = of_start if model is start else logits_of(model, window)[scored]
            with tiers.aged(model):
                tiered = logits_of(model, window)[scored]
            each = (
                torch.nn.functional.cross_entropy(full, targets, reduction="none"),
                kl_divergence(full, tiered),
                kl_divergence(of_start, tiered),
                full.argmax(-1) == tiered.argmax(-1),
            )
            scores.append(Scores(*(of_token.double().cpu().numpy() for of_token in each)))
        say(f"scored window {index + 1}/{len(windows)}")
    before, after = (Scores(*map(np.concatenate, zip(*each, strict=True))) for each in found)
    return before, after


def rows_of(case: str, before: Scores, after: Scores, seed: int) -> Iterable[dict[str, object]]:
    """As in benchmarks/results: `ours` is after, the peer before. The `interval` is of their
    difference: 95 %, by a bootstrap over segments of neighbouring tokens."""
    for metric in METRICS:
        was, now = getattr(before, metric.name), getattr(after, metric.name)
        row = Row(case, metric.name, metric.unit, metric.better, now.mean(), "before", was.mean())
        yield row.as_json() | {"interval": interval_of(now - was, seed), "num_tokens": len(was)}


def interval_of(differences: np.ndarray, seed: int) -> list[float]:
    segments = differences[: len(differences) // SEGMENT * SEGMENT].reshape(-1, SEGMENT).mean(1)
    drawn = np.random.default_rng(seed).choice(segments, (NUM_RESAMPLES, len(segments)))
    return np.percentile(drawn.mean(1), (2.5, 97.5)).tolist()


def print_table(rows: Iterable[dict[str, Any]]) -> None:
    says = {metric.name: metric.says for metric in METRICS}
    print(COLUMNS.format("", "", "before", "after", "difference, 95 %"))
    for row in rows:
        low, high = row["interval"]
        print(
            COLUMNS.format(
                row["case"],
                says[row["metric"]],
                f"{row['peer_value']:.5f}",
                f"{row['ours']:.5f}",
                f"{low:+.5f} to {high:+.5f}",
            )
        )


def write(file: Path, sha: str, device: torch.device, rows: Sequence[dict[str, object]]) -> None:
    where = (
        {"gpu": torch.cuda.get_device_name(device)}
        if device.type == "cuda"
        else {"cpu": cpu_name()}
    )
    python = ".".join(map(str, sys.version_info[:3]))
    content = {
        "sha": sha,
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        **where,
        "versions": {"python": python, **{package: version(package) for package in PACKAGES}},
        "command": " ".join(("python -m examples.cache_dropout", *sys.argv[1:])),
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
