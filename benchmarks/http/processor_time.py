"""What a server costs the host, by process: which of them a faster GPU would wait for."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S: int = os.sysconf("SC_CLK_TCK")
MAX_NAME_CHARACTERS = 48
# Fields of /proc/PID/stat behind the name in brackets, proc_pid_stat(5).
PARENT, USER_TICKS, SYSTEM_TICKS = 1, 11, 12


def descendants_s(root: int, proc: Path = PROC) -> dict[tuple[int, str], float]:
    """Processor seconds so far of every process that descends from `root`, by pid and name."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for pid, fields in _stats(proc):
        children.setdefault(int(fields[PARENT]), []).append(pid)
        seconds[pid] = (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / TICKS_PER_S
    found: dict[tuple[int, str], float] = {}
    unseen = list(children.get(root, ()))
    while unseen:
        pid = unseen.pop()
        unseen += children.get(pid, ())
        found[pid, _name(proc / str(pid))] = seconds[pid]
    return found


def microseconds_a_token(
    before: Mapping[tuple[int, str], float],
    after: Mapping[tuple[int, str], float],
    num_tokens: int,
) -> dict[str, float]:
    """By name, dearest first, of the processes that were there all the time: clients are not."""
    spent_s: Counter[str] = Counter()
    for process in before.keys() & after.keys():
        spent_s[process[1]] += after[process] - before[process]
    return {name: one_s * 1e6 / num_tokens for name, one_s in spent_s.most_common() if one_s > 0}


def _stats(proc: Path) -> Iterator[tuple[int, list[str]]]:
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                content = (folder / "stat").read_text(errors="replace")
            except OSError:  # it has ended since
                continue
            yield int(folder.name), content.rpartition(")")[2].split()


def _name(folder: Path) -> str:
    """As `ps` shows it, shortened; empty for one that has ended."""
    try:
        content = (folder / "cmdline").read_text(errors="replace")
    except OSError:
        return ""
    return content.replace("\0", " ").strip()[:MAX_NAME_CHARACTERS]
