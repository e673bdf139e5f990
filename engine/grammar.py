"""Grammars a completion must follow: what is asked for, and the protocol of what enforces it.

The engine knows no text. A compiler over the model's tokenizer is injected into it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidGrammar

MAX_GRAMMAR_CHARACTERS = 1 << 16


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is the JSON schema or the regular expression, and empty for JSON_OBJECT.
    Raises InvalidGrammar."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidGrammar(
                f"a {self.kind} may have {MAX_GRAMMAR_CHARACTERS} characters, got "
                f"{len(self.text)}; send a smaller one"
            )
        if bool(self.text) is (self.kind is GrammarKind.JSON_OBJECT):
            expected = "no text" if self.text else "a text"
            raise InvalidGrammar(f"a {self.kind} has {expected}, got {self.text[:80]!r}")


class GrammarState(Protocol):
    """How far one sequence has come. One thread at a time."""

    @property
    def has_failed(self) -> bool:
        """The grammar cost more than it may, in the middle: only a stop token is allowed now, and
        what came before is not all that the grammar wants."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """mask [num_mask_words(vocab_size)]: set bit i % 32 of word i // 32 where token i may come
        next, clear all others. At least one is set: where the grammar may end, a stop token."""

    def accept(self, token_id: int) -> None:
        """The token comes next."""


class GrammarCompiler(Protocol):
    """Safe to call from several threads."""

    def compile(self, grammar: Grammar) -> GrammarState:
        """At the start of a completion. Raises InvalidGrammar, saying what is wrong with it."""


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
