"""`flashray audit`: what was used, by whom, from the audit files."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from deployments.errors import DeploymentError
from deployments.model_files import default_state_dir
from router.audit import AuditRecord, read_audit, total_tokens

COLUMNS = "{:<20} {:>9} {:>8} {:>14} {:>12} {:>14} {:>8}"


def audit(
    folder: Path | None, team: str | None, since: str | None, request_id: str | None, as_json: bool
) -> int:
    """Print the records, or a table by team. Raises DeploymentError when there is no audit."""
    folder = folder or default_state_dir() / "audit"
    if not folder.is_dir():
        raise DeploymentError(f"{folder}: no audit here; name the folder with --folder")
    records = [
        record
        for record in read_audit(folder)
        if (team is None or record.team == team)
        and (since is None or record.time >= since)
        and (request_id is None or record.request_id == request_id)
    ]
    if as_json or request_id is not None:
        for record in records:
            print(json.dumps(asdict(record)))
    else:
        _print_table(records)
    return 0


def _print_table(records: list[AuditRecord]) -> None:
    by_team: dict[str, list[AuditRecord]] = defaultdict(list)
    for record in records:
        by_team[record.team or "(no key)"].append(record)
    header = (
        "team",
        "requests",
        "errors",
        "prompt tokens",
        "of it cached",
        "completion",
        "inexact",
    )
    print(COLUMNS.format(*header))
    for name, rows in sorted(by_team.items()):
        print(_line(name, rows))
    print(_line("total", records))


def _line(name: str, records: Iterable[AuditRecord]) -> str:
    rows = list(records)
    prompt, cached, completion = total_tokens(rows)
    errors = sum(row.status is not None and row.status >= 400 for row in rows)
    inexact = sum(not row.is_exact for row in rows)
    return COLUMNS.format(name[:20], len(rows), errors, prompt, cached, completion, inexact)
