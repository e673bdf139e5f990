"""One append-only record per request, exact to the token, and never a word of what was said."""

import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from router.account import RequestAccount

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """`cached_tokens` are part of `prompt_tokens`, `reasoning_tokens` of `completion_tokens`. Of
    several completions, the sums. `num_attempts` counts what was sent to upstreams.

    `is_exact` False: a generation broke before its backend could count it; such records stay out
    of the sums. `is_orphan`: its router died, and another one wrote this from the engine's journal;
    if the dead one had written its own record, that one counts.
    """

    time: str  # RFC 3339, UTC, of the end
    request_id: str
    team: str
    key_id: str
    dialect: str
    route: str
    model: str
    backend: str
    status: int | None  # None: the client left before there was one
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_completions: int = 0
    is_stream: bool = False
    is_exact: bool = True
    is_orphan: bool = False
    ttft_ms: float | None = None
    duration_ms: float | None = None
    finish_reasons: tuple[str, ...] = ()
    error_code: str | None = None
    reasoning_tokens: int = 0
    num_attempts: int = 0
    upstream_request_id: str | None = None


class AuditSink(Protocol):
    def write(self, record: AuditRecord) -> None:
        """Returns once the record would survive the death of this process. May raise OSError."""


class LogSink:
    """For apps that keep no audit of their own: one JSON line per request in the log."""

    def write(self, record: AuditRecord) -> None:
        logger.info("audit %s", json.dumps(asdict(record)))


class JsonlSink:
    """Appends to a file of this process alone: one write call per record, so no line is torn."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        host = socket.gethostname()  # a shared volume collects the files of many pods
        name = f"audit-{datetime.now(UTC):%Y%m%dT%H%M%S}-{host}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._descriptor = os.open(folder / name, flags, 0o600)

    def write(self, record: AuditRecord) -> None:
        os.write(self._descriptor, (json.dumps(asdict(record)) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


def record_of(account: RequestAccount, status: int | None) -> AuditRecord:
    outcomes = list(account.generations.values())
    principal = account.principal
    return AuditRecord(
        time=now(),
        request_id=account.request_id,
        team=principal.team if principal else "",
        key_id=principal.key_id if principal else "",
        dialect=account.dialect,
        route=account.route,
        model=account.model,
        backend=account.backend or ("local" if outcomes else ""),
        status=status,
        prompt_tokens=sum(outcome.usage.prompt_tokens for outcome in outcomes),
        cached_tokens=sum(outcome.usage.cached_tokens for outcome in outcomes),
        completion_tokens=sum(outcome.usage.completion_tokens for outcome in outcomes),
        num_completions=len(outcomes),
        is_stream=account.is_stream,
        is_exact=all(outcome.is_exact for outcome in outcomes),
        ttft_ms=_ms_since(account.started_s, account.first_token_s),
        duration_ms=_ms_since(account.started_s, time.monotonic()),
        finish_reasons=tuple(o.reason.value for o in outcomes if o.reason is not None),
        error_code=account.error_code,
        reasoning_tokens=sum(outcome.usage.reasoning_tokens for outcome in outcomes),
        num_attempts=account.num_attempts,
        upstream_request_id=account.upstream_request_id,
    )


def read_audit(folder: Path) -> Iterator[AuditRecord]:
    """Every request of the folder once, oldest file first. A line cut by a crash is skipped."""
    names = {field.name for field in fields(AuditRecord)}
    records: dict[str, AuditRecord] = {}
    for file in sorted(folder.glob("audit-*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                content = json.loads(line)
            except ValueError:
                continue
            content["finish_reasons"] = tuple(content.get("finish_reasons", ()))
            known = {name: value for name, value in content.items() if name in names}
            record = AuditRecord(**known)
            present = records.get(record.request_id)
            if present is None or present.is_orphan:
                records[record.request_id] = record
    yield from _without_repeated_choices(records)


def _without_repeated_choices(records: dict[str, AuditRecord]) -> Iterator[AuditRecord]:
    """An orphan is one generation, `ID` or `ID-2`; a record of `ID` by its router covers it."""
    for record in records.values():
        whole = records.get(record.request_id.partition("-")[0])
        if record.is_orphan and whole is not None and not whole.is_orphan:
            continue
        yield record


def total_tokens(records: Iterable[AuditRecord]) -> tuple[int, int, int]:
    """Prompt, cached and completion tokens of the exact records."""
    sums = [0, 0, 0]
    for record in records:
        if record.is_exact:
            sums[0] += record.prompt_tokens
            sums[1] += record.cached_tokens
            sums[2] += record.completion_tokens
    return sums[0], sums[1], sums[2]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms_since(started_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round((at_s - started_s) * 1e3, 1)
