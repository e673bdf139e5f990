"""Real text that every Python has: its documentation, and modules of its library."""

import argparse
import asyncio.base_events
import dataclasses
import hashlib
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.errors import MeasurementFailed

CODE_MODULES = (argparse, asyncio.base_events, dataclasses, typing)


@dataclass(frozen=True, slots=True)
class Text:
    """`windows`: token ids, of the same length each. `sha256` of the whole text, which other
    versions of Python have otherwise."""

    name: str
    sha256: str
    windows: tuple[tuple[int, ...], ...]

    @classmethod
    def cut(
        cls,
        name: str,
        whole: str,
        encode: Callable[[str], list[int]],
        num_windows: int,
        num_tokens: int,
    ) -> Self:
        """Windows one after the other, from its start on. Raises MeasurementFailed."""
        token_ids = encode(whole)
        if len(token_ids) < num_windows * num_tokens:
            raise MeasurementFailed(
                f"{name} has {len(token_ids)} tokens, {num_windows} windows of {num_tokens} need "
                f"{num_windows * num_tokens}; ask for fewer"
            )
        starts = range(0, num_windows * num_tokens, num_tokens)
        windows = tuple(tuple(token_ids[start : start + num_tokens]) for start in starts)
        return cls(name, hashlib.sha256(whole.encode()).hexdigest(), windows)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Of a model folder."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, model: Path) -> Self:
        from tokenizers import Tokenizer as FromFile

        found = FromFile.from_file(str(model / "tokenizer.json"))
        return cls(lambda text: found.encode(text).ids, found.decode)


def prose() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def code() -> str:
    return "\n\n".join(map(inspect.getsource, CODE_MODULES))


def real_texts(tokenizer: Tokenizer, num_windows: int, num_tokens: int) -> list[Text]:
    """Prose and code, `num_windows` windows of each. Raises MeasurementFailed."""
    wholes = {"prose": prose(), "code": code()}
    return [
        Text.cut(name, whole, tokenizer.encode, num_windows, num_tokens)
        for name, whole in wholes.items()
    ]
