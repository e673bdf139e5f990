"""Reading fields of JSON that another server wrote: what is not of its type is not there."""

from collections.abc import Mapping
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def first(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else None
