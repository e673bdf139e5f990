"""JSON patches (RFC 6902) as kustomize applies them, without `move` and `test`."""

import copy
from typing import Any


def apply(document: dict[str, Any], operation: dict[str, Any]) -> str:
    """Apply one operation in place; where it wrote, worded as faults are."""
    *parents, last = pointer(operation["path"])
    parent, path = descend(document, parents)
    match operation["op"]:
        case "add":
            key = put(parent, last, copy.deepcopy(operation["value"]))
        case "copy":
            source, _ = descend(document, pointer(operation["from"]))
            key = put(parent, last, copy.deepcopy(source))
        case "replace":
            key = step(parent, last)
            parent[key] = copy.deepcopy(operation["value"])
        case "remove":
            key = step(parent, last)
            del parent[key]
        case other:
            raise ValueError(f"{other} is not one of add, copy, replace, remove")
    return below(path, key)


def pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def step(parent: Any, part: str) -> str | int:
    """The key of an existing child. Raises KeyError, IndexError, ValueError, TypeError."""
    key = int(part) if isinstance(parent, list) else part
    parent[key]
    return key


def put(parent: Any, part: str, value: Any) -> str | int:
    if not isinstance(parent, list):
        parent[part] = value
        return part
    position = len(parent) if part == "-" else int(part)
    if position > len(parent):
        raise IndexError(f"{position} of {len(parent)}")
    parent.insert(position, value)
    return position


def descend(node: Any, parts: list[str]) -> tuple[Any, str]:
    path = ""
    for part in parts:
        key = step(node, part)
        node, path = node[key], below(path, key)
    return node, path


def below(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key
