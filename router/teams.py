"""Teams: whose keys open the door, what they may use, and how much of it. Read from a mapping, all
faults at once; a key in clear text is refused, and no message repeats a value that may be one."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from router.limits.policy import NO_LIMITS, Limits

TEAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY_HASH = re.compile(r"[0-9a-f]{64}")
HOW_TO_HASH = "run `flashray hash-key` and put the printed hash here"
MAX_LIMIT = 10**9  # levels of a bucket stay exact in the doubles of Lua


class TeamsError(ValueError):
    """Every fault of the file, one a line, each with the name of its field."""

    def __init__(self, source: str, faults: Sequence[str]) -> None:
        super().__init__("\n".join(f"{source}: {fault}" for fault in faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Team:
    """`key_hashes` are SHA-256 in hex. `models` None allows every model. `egress` lets a fallback
    take a request out of the company, where the route lets it too."""

    name: str
    key_hashes: frozenset[str] = frozenset()
    models: frozenset[str] | None = None
    backends: frozenset[str] = frozenset({"local"})
    limits: Limits = NO_LIMITS
    egress: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def may_reach(self, backend: str) -> bool:
        return backend in self.backends


def teams_from_mapping(mapping: Mapping[str, Any], source: str = "teams") -> tuple[Team, ...]:
    """Reads `{"teams": [{"name", "key_hashes", "models", "backends", "egress", "limits"}, ...]}`;
    all but the name may be left out. `source` names the file in messages. Raises TeamsError."""
    reader = _Reader()
    reader.known_fields(mapping, "", {"teams"})
    entries = mapping.get("teams")
    if not isinstance(entries, list):
        reader.fault("teams", "a list of teams", entries)
        entries = []
    teams = tuple(reader.team(entry, f"teams[{index}]") for index, entry in enumerate(entries))
    reader.unique(teams)
    if reader.faults:
        raise TeamsError(source, reader.faults)
    return teams


def teams_by_key_hash(teams: Sequence[Team]) -> dict[str, str]:
    return {key_hash: team.name for team in teams for key_hash in team.key_hashes}


class _Reader:
    """Collects faults; what it returns is good only while there are none."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def team(self, entry: Any, field: str) -> Team:
        if not isinstance(entry, dict):
            self.fault(field, "a mapping with at least `name`", entry)
            return Team("")
        self.known_fields(entry, field, {each.name for each in fields(Team)})
        models = entry.get("models")
        return Team(
            name=self.name(entry.get("name"), f"{field}.name"),
            key_hashes=self.key_hashes(entry.get("key_hashes", []), f"{field}.key_hashes"),
            models=None if models is None else self.strings(models, f"{field}.models"),
            backends=self.strings(entry.get("backends", ["local"]), f"{field}.backends"),
            egress=self.flag(entry.get("egress", False), f"{field}.egress"),
            limits=self.limits(entry.get("limits", {}), f"{field}.limits"),
        )

    def name(self, value: Any, field: str) -> str:
        if isinstance(value, str) and TEAM_NAME.fullmatch(value):
            return value
        self.fault(
            field, "1 to 64 letters, digits, `.`, `_` or `-`, a letter or digit first", value
        )
        return ""

    def key_hashes(self, values: Any, field: str) -> frozenset[str]:
        hashes = self.strings(values, field)
        for index, value in enumerate(values if isinstance(values, list) else []):
            if isinstance(value, str) and not KEY_HASH.fullmatch(value):
                self.faults.append(
                    f"{field}[{index}]: expected the SHA-256 of a key, 64 lower-case hex digits, "
                    f"got {len(value)} characters; if this is a key in clear text, {HOW_TO_HASH}"
                )
        return hashes

    def strings(self, values: Any, field: str) -> frozenset[str]:
        if not isinstance(values, list):
            self.fault(field, "a list of strings", values)
            return frozenset()
        for index, value in enumerate(values):
            if not isinstance(value, str):
                self.fault(f"{field}[{index}]", "a string", value)
        return frozenset(value for value in values if isinstance(value, str))

    def flag(self, value: Any, field: str) -> bool:
        if isinstance(value, bool):
            return value
        self.fault(field, "true or false", value)
        return False

    def limits(self, entry: Any, field: str) -> Limits:
        if not isinstance(entry, dict):
            self.fault(field, "a mapping", entry)
            return NO_LIMITS
        self.known_fields(entry, field, {each.name for each in fields(Limits)})
        return Limits(
            requests_per_minute=self.count(entry, "requests_per_minute", field),
            tokens_per_minute=self.count(entry, "tokens_per_minute", field),
            max_concurrent_requests=self.count(entry, "max_concurrent_requests", field),
            max_queued=self.max_queued(entry.get("max_queued", NO_LIMITS.max_queued), field),
            weight=self.weight(entry.get("weight", NO_LIMITS.weight), field),
        )

    def count(self, entry: Mapping[str, Any], name: str, field: str) -> int | None:
        value = entry.get(name)
        if value is None or (type(value) is int and 1 <= value <= MAX_LIMIT):
            return value
        self.fault(f"{field}.{name}", f"a whole number from 1 to {MAX_LIMIT}, or null", value)
        return None

    def max_queued(self, value: Any, field: str) -> int:
        if type(value) is int and 0 <= value <= MAX_LIMIT:
            return value
        self.fault(f"{field}.max_queued", f"a whole number from 0 to {MAX_LIMIT}", value)
        return 0

    def weight(self, value: Any, field: str) -> float:
        if type(value) in (int, float) and 0 < value < math.inf:
            return float(value)
        self.fault(f"{field}.weight", "a positive number", value)
        return 1.0

    def known_fields(self, entry: Mapping[str, Any], field: str, known: set[str]) -> None:
        for name in entry:
            if name not in known:
                path = f"{field}.{name}" if field else str(name)
                advice = f"; keys are kept hashed: {HOW_TO_HASH}" if "key" in str(name) else ""
                self.faults.append(
                    f"{path}: unknown field, expected one of {', '.join(sorted(known))}{advice}"
                )

    def unique(self, teams: Sequence[Team]) -> None:
        owners: dict[str, int] = {}
        names: dict[str, int] = {}
        for index, team in enumerate(teams):
            if team.name and names.setdefault(team.name, index) != index:
                self.faults.append(
                    f"teams[{index}].name: {team.name!r} is also teams[{names[team.name]}]"
                )
            for key_hash in sorted(team.key_hashes):
                if owners.setdefault(key_hash, index) != index:
                    self.faults.append(
                        f"teams[{index}].key_hashes: {key_hash[:8]}... is also a key of "
                        f"teams[{owners[key_hash]}]; a key belongs to one team"
                    )

    def fault(self, field: str, expected: str, value: Any) -> None:
        got = "nothing" if value is None else type(value).__name__
        shown = f" {value!r}" if type(value) in (int, float, bool) else ""
        self.faults.append(f"{field}: expected {expected}, got {got}{shown}")
