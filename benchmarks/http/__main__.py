"""`python -m benchmarks.http --sha SHA --out FILE` on a GPU host, in some seven minutes.

`flashray serve`, keys, limits and audit on, through Ray Serve; then `vllm serve`. Both with random
weights of the 8B shape, the same bytes for keys and values, the same context, prefix caches on, and
the same requests over loopback. `--device cpu` tries the benchmark itself on a tiny shape.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.command import Progress, table
from benchmarks.engine.gpu_process import GpuProcesses, require_idle_gpu
from benchmarks.engine.parity import require_parity
from benchmarks.engine.shapes import LLAMA_8B, Shape
from benchmarks.errors import BenchmarkError, MeasurementFailed
from benchmarks.gpu_results import write_gpu_results
from benchmarks.http import traffic
from benchmarks.http.bars import CONCURRENCIES, rows_of
from benchmarks.http.model_folder import words, write_model_folder
from benchmarks.http.processor_time import descendants_s, microseconds_a_token
from benchmarks.http.rounds import Endpoint, Load, Round, run_round, warm_up
from benchmarks.http.servers import Name, Setting, peer_version, server
from benchmarks.results import Row

MODULE = "benchmarks.http"
TINY = Shape("tiny", 64, 128, 2, 4, 2, 16, 4096, 1e4, False)
SEED = 20261130
MAX_MODEL_LEN = 8192
KV_CACHE_GIB = {"cuda": 48.0, "cpu": 0.25}
LENGTH_SCALE = {"cuda": 1.0, "cpu": 0.1}
RAMP_S = {"cuda": 2.0, "cpu": 0.0}
SECONDS = {"flashray": 200.0, "vllm": 280.0}  # of one server, its start included
MAX_ROUND_S = 25.0
WARM_UP_ROUND = -1
NUM_SHOWN = 4  # processes, the dearest


@dataclass(slots=True)
class HttpRun:
    """What came of it, by server and concurrency."""

    arguments: argparse.Namespace
    progress: Progress
    started_s: float = field(default_factory=time.monotonic)
    rounds: dict[Name, dict[int, list[Round]]] = field(
        default_factory=lambda: {"flashray": {}, "vllm": {}}
    )
    processor_us: dict[Name, dict[int, list[dict[str, float]]]] = field(
        default_factory=lambda: {"flashray": {}, "vllm": {}}
    )
    ready_s: dict[Name, float] = field(default_factory=dict)
    failed: dict[Name, str] = field(default_factory=dict)
    peer: str | None = None

    @property
    def shape(self) -> Shape:
        return LLAMA_8B if self.arguments.device == "cuda" else TINY

    def measure(self, name: Name) -> None:
        """What fails is said, and what was measured until then counts."""
        try:
            with tempfile.TemporaryDirectory(prefix="flashray-http-") as folder:
                self._measure(name, Path(folder))
        except MeasurementFailed as exc:
            self.failed[name] = str(exc)
            self.progress(f"{name}: {exc}")

    def rows(self) -> list[Row]:
        return list(rows_of(self.rounds["flashray"], self.peer, self.rounds["vllm"]))

    def more(self) -> dict[str, object]:
        """For the file."""
        return {
            "method": "closed loops over loopback, clients in processes of their own; medians of "
            "rounds; rates while every sender was busy",
            "traffic": {"seed": SEED, "source": traffic.__doc__, **self._traffic()},
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_gib": KV_CACHE_GIB[self.arguments.device],
            "router_replicas": self.arguments.router_replicas,
            "peer": self.peer,
            "ready_s": self.ready_s,
            "rounds": {
                name: {each: [asdict(one) for one in rounds] for each, rounds in of_server.items()}
                for name, of_server in self.rounds.items()
            },
            "processor_us_a_token": self.processor_us,  # of each process of a server
            "failed": self.failed,
        }

    def _measure(self, name: Name, folder: Path) -> None:
        device = self.arguments.device
        if device == "cuda":
            require_idle_gpu()
        deadline_s = time.monotonic() + self._seconds_for(name)
        model = write_model_folder(self.shape, folder / "benchmark-model", MAX_MODEL_LEN)
        kv_gib, routers = KV_CACHE_GIB[device], self.arguments.router_replicas
        setting = Setting(model, device, MAX_MODEL_LEN, kv_gib, routers)
        self.progress(f"{name}: starting")
        started_s = time.monotonic()
        with server(name, setting, folder) as endpoint:
            self.ready_s[name] = time.monotonic() - started_s
            self.progress(f"{name}: ready after {self.ready_s[name]:.1f} s")
            if name == "vllm":
                self.peer = peer_version(endpoint)
            self._run_rounds(name, endpoint, deadline_s)

    def _run_rounds(self, name: Name, endpoint: Endpoint, deadline_s: float) -> None:
        """A round of each concurrency, then the next of each: a late end costs rounds, no case."""
        most = max(self.arguments.concurrency)
        load = self._load(endpoint, most, WARM_UP_ROUND)
        warm_up(replace(load, requests=load.requests[:most]))
        for number in range(self.arguments.rounds):
            for concurrency in self.arguments.concurrency:
                if time.monotonic() + MAX_ROUND_S > deadline_s:
                    raise MeasurementFailed("out of time")
                load = self._load(endpoint, concurrency, number)
                before_s = descendants_s(os.getpid())
                measured = run_round(load)
                num_tokens = sum(request.num_tokens for request in load.requests)
                spent_us = microseconds_a_token(before_s, descendants_s(os.getpid()), num_tokens)
                self.rounds[name].setdefault(concurrency, []).append(measured)
                self.processor_us[name].setdefault(concurrency, []).append(spent_us)
                self.progress(f"{name}: {concurrency} at once: {_described(measured)}")
                self.progress(f"{name}: processor us a token: {_dearest(spent_us)}")

    def _load(self, endpoint: Endpoint, concurrency: int, number: int) -> Load:
        ramp_s = RAMP_S[self.arguments.device] if concurrency > 1 else 0.0
        return Load(endpoint, self._requests(concurrency, number), concurrency, ramp_s)

    def _requests(self, concurrency: int, number: int) -> list[traffic.Request]:
        """The same for every server, others in every round: none is cached before."""
        count = _num_requests(concurrency)
        seed = SEED + 1000 * concurrency + number
        scale = LENGTH_SCALE[self.arguments.device]
        return traffic.requests(words(self.shape.vocab_size), count, seed, scale)

    def _traffic(self) -> dict[str, object]:
        """The mean lengths that were drawn, by concurrency."""
        means: dict[str, object] = {}
        for concurrency in self.arguments.concurrency:
            drawn = [
                request
                for number in range(self.arguments.rounds)
                for request in self._requests(concurrency, number)
            ]
            means[f"c{concurrency}"] = {
                "requests_a_round": _num_requests(concurrency),
                "mean_prompt_tokens": sum(each.prompt.count(" ") for each in drawn) / len(drawn),
                "mean_output_tokens": sum(each.num_tokens for each in drawn) / len(drawn),
            }
        return means

    def _seconds_for(self, name: Name) -> float:
        """Until no round starts any more."""
        given = self.arguments.seconds if name == "flashray" else self.arguments.peer_seconds
        seconds: float = given or SECONDS[name]
        if self.arguments.total_seconds is not None:
            left_s = self.started_s + self.arguments.total_seconds - time.monotonic()
            seconds = min(seconds, left_s)
        return seconds


def main() -> int:
    arguments = _arguments()
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    run = HttpRun(arguments, progress)
    if arguments.out is not None:
        try:
            require_idle_gpu()
            progress("gate: parity")
            require_parity(arguments.parity, arguments.sha, GpuProcesses(), progress)
        except BenchmarkError as exc:
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
            return 1
    command = " ".join(("python -m", MODULE, *[Path(each).name for each in sys.argv[1:]]))
    for name in _servers(arguments.peer):
        run.measure(name)
        if arguments.out is not None and run.rows():
            write_gpu_results(arguments.out, arguments.sha, command, run.rows(), run.more())
            progress(f"wrote {arguments.out}")
    print(table(run.rows()))
    for name, why in run.failed.items():
        print(f"{name}: {why}")
    return 1 if "flashray" in run.failed else 0


def _servers(peer: str) -> list[Name]:
    """A peer that is not wanted or not there is left out."""
    is_there = peer == "vllm" and importlib.util.find_spec("vllm") is not None
    return ["flashray", "vllm"] if is_there else ["flashray"]


def _num_requests(concurrency: int) -> int:
    """Some ten seconds of them on a GPU."""
    return 8 if concurrency == 1 else (5 if concurrency <= 32 else 3) * concurrency


def _described(measured: Round) -> str:
    return (
        f"{measured.goodput:.0f} of {measured.tok_s:.0f} tok/s are good, "
        f"TTFT p50 {measured.ttft_p50_ms:.1f} ms, ITL p50 {measured.itl_p50_ms:.1f}, "
        f"p99 {measured.itl_p99_ms:.1f} ms, {measured.tokens_an_event:.2f} tokens an event, "
        f"{measured.num_failed} of {measured.num_requests} failed {measured.failures[:1] or ''}"
    )


def _dearest(spent_us: Mapping[str, float]) -> str:
    return ", ".join(f"{us:.1f} {name}" for name, us in list(spent_us.items())[:NUM_SHOWN])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--sha", help="the commit that is measured; goes into the file")
    parser.add_argument("--out", type=Path, help="the file; without it nothing is gated or written")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peer", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--concurrency", type=_numbers, default=CONCURRENCIES, help="as in 1,32")
    parser.add_argument("--router-replicas", type=int, default=1, help="of ours")
    parser.add_argument("--rounds", type=int, default=3, help="of each concurrency")
    parser.add_argument("--parity", type=Path, help="a file of benchmarks.engine.parity, as gate")
    parser.add_argument("--seconds", type=float, help="for our server, start included")
    parser.add_argument("--peer-seconds", type=float, help="for the peer's")
    parser.add_argument("--total-seconds", type=float, help="for both")
    arguments = parser.parse_args()
    if arguments.out is not None and (arguments.sha is None or arguments.device == "cpu"):
        parser.error("--out needs --sha, and a GPU")
    return arguments


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
