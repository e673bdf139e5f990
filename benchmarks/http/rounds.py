"""A round of load on a running server, and what it sums up to."""

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import MeasurementFailed
from benchmarks.http.client import Answer, Told
from benchmarks.http.stream import Timing
from benchmarks.http.traffic import Request
from benchmarks.percentiles import percentile
from benchmarks.results import ROOT

MAX_TTFT_MS, MAX_TPOT_MS = 1000.0, 50.0  # what a good answer keeps
SENDERS_A_PROCESS = 32
START_S = 2.0  # until every client has started
ROUND_TIMEOUT_S = 180.0
MAX_SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Round:
    """`goodput` and `tok_s`: output tokens a second while every sender was busy, of requests within
    the limits, and of all. Of all requests: time to first text, gaps between texts, tokens of one
    event with text."""

    goodput: float
    tok_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_an_event: float
    num_requests: int
    num_failed: int
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` senders, the last of them `ramp_s` after the first."""

    endpoint: Endpoint
    requests: Sequence[Request]
    concurrency: int
    ramp_s: float


def run_round(load: Load) -> Round:
    """Raises MeasurementFailed when nothing was served, or a client broke."""
    start_s = time.monotonic() + START_S
    return summary(_run_clients(_split(load, start_s)), start_s + load.ramp_s)


def warm_up(load: Load) -> None:
    """Raises MeasurementFailed when a request failed, or a client broke."""
    for answer in _run_clients(_split(load, time.monotonic() + START_S)):
        if answer.failures:
            raise MeasurementFailed(f"the first requests failed: {answer.failures[0]}")


def _split(load: Load, start_s: float) -> list[Told]:
    """Into clients of at most SENDERS_A_PROCESS."""
    concurrency = load.concurrency
    num_clients = -(-concurrency // SENDERS_A_PROCESS)
    return [
        Told(
            load.endpoint.url,
            load.endpoint.key,
            load.endpoint.model,
            tuple(load.requests[client::num_clients]),
            concurrency // num_clients + (client < concurrency % num_clients),
            start_s,
            load.ramp_s,
        )
        for client in range(num_clients)
    ]


def summary(answers: Sequence[Answer], start_s: float) -> Round:
    """Raises MeasurementFailed when nothing was served between `start_s` and the first moment that
    a sender had nothing to send."""
    timings = [timing for answer in answers for timing in answer.timings]
    failures = [failure for answer in answers for failure in answer.failures]
    end_s = min(answer.exhausted_s for answer in answers)
    gaps_ms = [gap for timing in timings for gap in timing.gaps_ms]
    if not gaps_ms or end_s <= start_s:
        raise MeasurementFailed(f"no load for a while: {failures[:1] or 'too few requests'}")
    ttfts_ms = [timing.ttft_ms for timing in timings]
    return Round(
        goodput=_rate(list(filter(is_good, timings)), start_s, end_s),
        tok_s=_rate(timings, start_s, end_s),
        ttft_p50_ms=percentile(ttfts_ms, 50),
        ttft_p99_ms=percentile(ttfts_ms, 99),
        itl_p50_ms=percentile(gaps_ms, 50),
        itl_p99_ms=percentile(gaps_ms, 99),
        tokens_an_event=sum(t.num_tokens for t in timings) / sum(len(t.text_s) for t in timings),
        num_requests=len(timings) + len(failures),
        num_failed=len(failures),
        failures=tuple(failures[:MAX_SHOWN_FAILURES]),
    )


def is_good(timing: Timing) -> bool:
    return timing.ttft_ms <= MAX_TTFT_MS and timing.tpot_ms <= MAX_TPOT_MS


def _rate(timings: Sequence[Timing], start_s: float, end_s: float) -> float:
    return sum(timing.tokens_within(start_s, end_s) for timing in timings) / (end_s - start_s)


def _run_clients(told: Sequence[Told]) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="flashray-clients-") as folder:
        files = [(Path(folder, f"{i}.told"), Path(folder, f"{i}.answer")) for i in range(len(told))]
        clients: list[subprocess.Popen[bytes]] = []
        try:
            for one, (told_file, answer_file) in zip(told, files, strict=True):
                told_file.write_bytes(pickle.dumps(one))
                clients.append(_start_client(told_file, answer_file))
            deadline_s = time.monotonic() + ROUND_TIMEOUT_S
            for client in clients:
                if client.wait(max(0.0, deadline_s - time.monotonic())) != 0:
                    raise MeasurementFailed(f"a client ended with {client.returncode}")
        except subprocess.TimeoutExpired as exc:
            raise MeasurementFailed(f"a round took longer than {ROUND_TIMEOUT_S:.0f} s") from exc
        finally:
            for client in clients:
                client.kill()
                client.wait()
        return [pickle.loads(answer_file.read_bytes()) for _, answer_file in files]


def _start_client(told_file: Path, answer_file: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.http.client_process",
        str(told_file),
        str(answer_file),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
