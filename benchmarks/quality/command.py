"""The exact cache first, then every setting beside it, an engine after the other."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import Progress
from benchmarks.errors import BenchmarkError
from benchmarks.gpu_results import write_gpu_results
from benchmarks.kv_engine.gate import require_green_tiers
from benchmarks.quality.bars import ENGINES, rows_of
from benchmarks.quality.forced import SCORED_FROM, Exact, Scores, compare
from benchmarks.quality.intervals import COVERED, NUM_DRAWS, RUN_TOKENS
from benchmarks.quality.recall import Task, answers, summary, tasks
from benchmarks.quality.session import Session, open_session
from benchmarks.quality.settings import AGES, BY_NAME, FLOOR, Cache, Setting, by_cache, in_turn
from benchmarks.quality.texts import Text, Tokenizer, real_texts
from benchmarks.results import Row
from engine.build import weights_sha256

MODULE = "benchmarks.quality"
NUM_WINDOWS, NUM_TOKENS, NUM_THREADS = 2, 8192, 4
METHOD = (
    "teacher-forced: windows follow each other from a text's start; the first {prompt} tokens of a "
    "window are its prompt, all others are given as if they were decoded, those from position "
    "{prompt} on are scored; intervals cover {covered:.0%} of {draws} draws of runs of {run} "
    "tokens. Engines are measured as they serve, in bfloat16, one token a step; their rounding "
    "alone is {floor}. Formats are put into the exact cache in float32 as tokens age, a block a "
    "step: ours by the reference of our kernels; peers' by their arithmetic, not their kernels, "
    "and what is warm with us stays exact with them. Engines also recall."
)


@dataclass(slots=True)
class Run:
    """`found`: of each setting, by text what `Scores.as_json` says, and what an engine recalled."""

    arguments: argparse.Namespace
    progress: Progress
    tokenizer: Tokenizer
    texts: list[Text]
    tasks: list[Task]
    found: dict[str, Any] = field(default_factory=dict)
    served: dict[str, dict[str, Scores]] = field(default_factory=dict)  # in bfloat16, as `found`
    recalled: dict[str, Any] = field(default_factory=dict)  # by the exact cache, as it serves
    head_dim: int = 0

    def measure(self, settings: list[Setting]) -> Iterator[None]:
        """In turn; each time there is more in `found`."""
        caches = by_cache(settings)
        for exact in dict.fromkeys(cache.exact for cache in caches):
            of_dtype = {each: caches[each] for each in caches if each.exact == exact}
            yield from self._measure_beside(exact, of_dtype)

    def _measure_beside(
        self, exact_cache: Cache, caches: dict[Cache, list[Setting]]
    ) -> Iterator[None]:
        """One engine at a time is there."""
        session = self._open(exact_cache, caches.get(exact_cache, []))
        self.head_dim = session.head_dim
        exact = Exact.of(session, self.texts, self.arguments.device)
        self.progress(f"exact in {exact_cache.dtype}: {exact.targets.numel()} tokens")
        for settings in in_turn(caches.pop(exact_cache, [])):
            self._compare(session, exact, settings)
            yield
        said = self._recall(session) if caches else []
        del session
        if said:
            self.recalled = self._held(said, said)
            self._tell_recall("exact", self.recalled)
        for cache, settings in caches.items():
            session = self._open(cache, settings)
            self._compare(session, exact, settings)
            recalled = self._held(self._recall(session), said)
            for setting in settings:
                self.found[setting.name]["recall"] = recalled
                self._tell_recall(setting.name, recalled)
            del session
            yield

    def _open(self, cache: Cache, settings: list[Setting]) -> Session:
        num_windows = sum(len(text.windows) for text in self.texts)
        num_sequences = max(num_windows * max(1, len(settings)), len(self.tasks))
        arguments = self.arguments
        return open_session(
            arguments.model,
            arguments.device,
            cache,
            num_sequences,
            arguments.tokens,
            arguments.threads,
        )

    def _compare(self, session: Session, exact: Exact, settings: list[Setting]) -> None:
        for setting, text, scores in compare(session, exact, settings, self.texts):
            told = self.found.setdefault(setting.name, self._described(setting))
            told[text.name] = scores.as_json()
            if setting.emulated is None:
                self.served.setdefault(setting.name, {})[text.name] = scores
            self.progress(_line(setting, text, told[text.name]))
        self._hold_against_floor()

    def _hold_against_floor(self) -> None:
        """Engines, once the floor is there."""
        for text, floor in self.served.get(FLOOR, {}).items():
            for name in set(ENGINES) & self.served.keys():
                above = self.served[name][text].above(floor)
                self.found[name][text]["kl_above_floor"] = above.as_json()

    def _tell_recall(self, name: str, recalled: Mapping[str, Any]) -> None:
        if self.tasks:
            self.progress(f"{name}: {_shares(recalled)}")

    def _recall(self, session: Session) -> list[list[int]]:
        num_tokens = max((task.num_answer_tokens for task in self.tasks), default=0)
        return session.complete([task.prompt for task in self.tasks], num_tokens)

    def _held(self, came: list[list[int]], said: list[list[int]]) -> dict[str, Any]:
        return summary(self.tasks, answers(self.tasks, came, said, self.tokenizer))

    def _described(self, setting: Setting) -> dict[str, Any]:
        return {
            "kind": setting.kind,
            "title": setting.title,
            "bytes": setting.num_bytes(self.head_dim),
        }

    def more(self) -> dict[str, object]:
        """For the file."""
        return {
            "method": METHOD.format(
                prompt=SCORED_FROM, covered=COVERED, draws=NUM_DRAWS, run=RUN_TOKENS, floor=FLOOR
            ),
            "model": self.arguments.model.name,
            "weights_sha256": weights_sha256(self.arguments.model),
            "head_dim": self.head_dim,
            "tiers": asdict(AGES),
            "texts": {
                text.name: {
                    "sha256": text.sha256,
                    "num_windows": len(text.windows),
                    "num_tokens": len(text.windows[0]),
                    "num_scored": sum(len(each) - SCORED_FROM for each in text.windows),
                }
                for text in self.texts
            },
            "scored_from": SCORED_FROM,
            "exact_recall": self.recalled,
            "settings": self.found,
        }


def main() -> int:
    """The exit status: 1 when a gate was red, or something could not be measured."""
    arguments = _arguments()
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    try:
        _run(arguments, progress)
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace, progress: Progress) -> None:
    """Raises BenchmarkError."""
    if arguments.out is not None:
        progress("gate: kernels and engines of tiers")
        require_green_tiers()
    tokenizer = Tokenizer.of(arguments.model)
    texts = real_texts(tokenizer, arguments.windows, arguments.tokens)
    to_recall = tasks(tokenizer, arguments.tokens) if arguments.recall else []
    run = Run(arguments, progress, tokenizer, texts, to_recall)
    # Files by their names: where they lay on that host says nothing to a reader.
    command = " ".join(("python -m", MODULE, *[Path(each).name for each in sys.argv[1:]]))
    for _ in run.measure([BY_NAME[name] for name in arguments.settings]):
        if arguments.out is not None:
            rows = list(rows_of(run.found))
            write_gpu_results(arguments.out, arguments.sha, command, rows, {"more": run.more()})
            progress(f"wrote {arguments.out}")
    for row in rows_of(run.found):
        print(told(row))


def _line(setting: Setting, text: Text, told: Mapping[str, Any]) -> str:
    kl, low, high = told["kl"]
    by_window = ", ".join(f"{each:.2e}" for each in told["kl_by_window"])
    return (
        f"{setting.name}, {text.name}: KL {kl:.2e} ({low:.1e} to {high:.1e}), top-1 "
        f"{told['top1'][0]:.4f}, NLL {told['delta_nll'][0]:+.1e}; by window {by_window}"
    )


def _shares(recalled: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {share:.2f}" for name, share in recalled.items() if name != "answers")


def told(row: Row) -> str:
    """One line, for people: KLs are too small for the table of other benchmarks."""
    verdict = {None: "", True: " met", False: " MISSED"}[row.meets_floor]
    beside = "" if row.peer is None else f", {row.peer} {row.peer_value:.3g}"
    bar = "" if row.floor is None else f"; {row.floor:g} ({row.floor_of}){verdict}"
    return f"{row.case:30} {row.ours:9.3g} {row.unit}{beside}{bar}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the model's folder")
    parser.add_argument("--device", default="cuda:0", help="of a CPU no file is written")
    parser.add_argument("--sha", help="the commit that is measured; goes into the file")
    parser.add_argument("--out", type=Path, help="the file; without it nothing is gated or written")
    parser.add_argument("--settings", nargs="+", choices=BY_NAME, default=list(BY_NAME))
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help="of each text")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of a window")
    parser.add_argument("--no-recall", dest="recall", action="store_false", help="leave that out")
    parser.add_argument("--threads", type=int, default=NUM_THREADS, help="of PyTorch on the CPU")
    arguments = parser.parse_args()
    if arguments.out is not None and arguments.sha is None:
        parser.error("--out needs --sha")
    if arguments.out is not None and not arguments.device.startswith("cuda"):
        parser.error("--out needs a GPU: a trial on a CPU says nothing about one")
    if arguments.out is not None and not arguments.recall:
        parser.error("--out needs what is recalled, too: leave --no-recall out")
    if arguments.tokens <= SCORED_FROM:
        parser.error(f"--tokens must be above {SCORED_FROM}, where scoring begins")
    return arguments
