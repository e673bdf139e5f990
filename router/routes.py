"""Which backends answer for a model name, in which order. A table never changes: a new one takes
its place whole, or is refused with all its faults."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

LOCAL = "local"
MAX_INPUT_TOKENS = 200_000
MAX_TOKENS = 64_000


class RoutesError(ValueError):
    """Every fault of a table, one a line, each with the name of its field."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Target:
    """`model` is the name the backend knows."""

    backend: str
    model: str


@dataclass(frozen=True, slots=True)
class Route:
    """`targets` are tried in order. `egress` lets a fallback leave the company, for teams that may.
    `max_input_tokens` and `max_tokens` are what the model's card says; nothing is held to them."""

    model: str
    targets: tuple[Target, ...]
    aliases: tuple[str, ...] = ()
    egress: bool = False
    max_input_tokens: int = MAX_INPUT_TOKENS
    max_tokens: int = MAX_TOKENS


class RouteTable:
    def __init__(self, routes: Sequence[Route] = ()) -> None:
        self.routes = tuple(routes)
        self._by_name = {name: route for route in routes for name in (route.model, *route.aliases)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, name: str) -> Route | None:
        return self._by_name.get(name)


def routes_from_list(
    entries: Any, backends: Collection[str], local_models: Collection[str] | None = None
) -> RouteTable:
    """Reads `[{"model", "targets": [{"backend", "model"}, ...], "aliases", "egress", ...}, ...]`;
    all but the model and its targets may be left out. A target is one of `backends`, or
    `local` and one of `local_models` where these are known. Raises RoutesError."""
    reader = _Reader({LOCAL, *backends}, local_models)
    if not isinstance(entries, list | tuple):
        raise RoutesError([f"routes: expected a list, got {type(entries).__name__}"])
    routes = [reader.route(entry, f"routes[{index}]") for index, entry in enumerate(entries)]
    if not reader.faults:
        reader.check_names(routes)
    if reader.faults:
        raise RoutesError(reader.faults)
    return RouteTable(routes)


class _Reader:
    """Collects faults; what it returns is good only while there are none."""

    def __init__(self, backends: Collection[str], local_models: Collection[str] | None) -> None:
        self.faults: list[str] = []
        self._backends = backends
        self._local_models = local_models

    def route(self, entry: Any, field: str) -> Route:
        if not self._is_mapping(entry, field, {each.name for each in fields(Route)}):
            return Route("", ())
        targets = self._list(entry.get("targets"), f"{field}.targets")
        if entry.get("targets") == []:
            self.faults.append(f"{field}.targets: expected at least one target")
        aliases = self._list(entry.get("aliases", []), f"{field}.aliases")
        return Route(
            model=self._text(entry.get("model"), f"{field}.model"),
            targets=tuple(
                self._target(target, f"{field}.targets[{index}]")
                for index, target in enumerate(targets)
            ),
            aliases=tuple(
                self._text(alias, f"{field}.aliases[{index}]")
                for index, alias in enumerate(aliases)
            ),
            egress=self._flag(entry.get("egress", False), f"{field}.egress"),
            max_input_tokens=self._count(entry, "max_input_tokens", field, MAX_INPUT_TOKENS),
            max_tokens=self._count(entry, "max_tokens", field, MAX_TOKENS),
        )

    def check_names(self, routes: Sequence[Route]) -> None:
        owners: dict[str, str] = {}
        for route in routes:
            for name in (route.model, *route.aliases):
                if name in owners:
                    self.faults.append(
                        f"{name!r} is a name of {owners[name]!r} and {route.model!r}"
                    )
                owners[name] = route.model

    def _target(self, entry: Any, field: str) -> Target:
        if not self._is_mapping(entry, field, {each.name for each in fields(Target)}):
            return Target("", "")
        backend = self._text(entry.get("backend"), f"{field}.backend")
        if backend and backend not in self._backends:
            known = ", ".join(sorted(self._backends))
            self.faults.append(f"{field}.backend: expected one of {known}, got {backend!r}")
        model = self._text(entry.get("model"), f"{field}.model")
        if backend == LOCAL and self._local_models is not None and model not in self._local_models:
            known = ", ".join(self._local_models)
            self.faults.append(f"{field}.model: expected one of {known}, got {model!r}")
        return Target(backend, model)

    def _is_mapping(self, entry: Any, field: str, known: set[str]) -> bool:
        if not isinstance(entry, dict):
            self._fault(field, "a mapping", entry)
            return False
        self.faults += [
            f"{field}.{name}: unknown field, expected one of {', '.join(sorted(known))}"
            for name in entry
            if name not in known
        ]
        return True

    def _list(self, value: Any, field: str) -> Sequence[Any]:
        if isinstance(value, list | tuple):
            return value
        self._fault(field, "a list", value)
        return ()

    def _text(self, value: Any, field: str) -> str:
        if isinstance(value, str) and value:
            return value
        self._fault(field, "a name", value)
        return ""

    def _flag(self, value: Any, field: str) -> bool:
        if isinstance(value, bool):
            return value
        self._fault(field, "true or false", value)
        return False

    def _count(self, entry: Mapping[str, Any], name: str, field: str, default: int) -> int:
        value = entry.get(name, default)
        if type(value) is int and value > 0:
            return value
        self._fault(f"{field}.{name}", "a whole number above 0", value)
        return default

    def _fault(self, field: str, expected: str, value: Any) -> None:
        self.faults.append(f"{field}: expected {expected}, got {type(value).__name__}")
