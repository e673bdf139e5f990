"""Grammars of token ids: "5 6,7" is 5 or 6, then 7, then the stop token."""

import numpy as np

from engine.errors import InvalidGrammar
from engine.grammar import Grammar

STOP = 2


class FakeGrammarState:
    """Fails at position `fail_at`, as a grammar that has become too expensive."""

    def __init__(self, choices: list[set[int]], fail_at: int | None = None) -> None:
        self.accepted: list[int] = []
        self._choices = choices
        self._fail_at = fail_at

    @property
    def has_failed(self) -> bool:
        return self._fail_at is not None and len(self.accepted) >= self._fail_at

    @property
    def allowed(self) -> set[int]:
        position = len(self.accepted)
        if self.has_failed or position >= len(self._choices):
            return {STOP}
        return self._choices[position]

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token_id in self.allowed:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32).astype(np.int32)

    def accept(self, token_id: int) -> None:
        assert token_id in self.allowed, f"{token_id} is not among {self.allowed}"
        self.accepted.append(token_id)


class FakeGrammars:
    def __init__(self, fail_at: int | None = None) -> None:
        self.states: list[FakeGrammarState] = []
        self._fail_at = fail_at

    def compile(self, grammar: Grammar) -> FakeGrammarState:
        try:
            choices = [set(map(int, choice.split())) for choice in grammar.text.split(",")]
        except ValueError as exc:
            raise InvalidGrammar(f"expected token ids, got {grammar.text!r}") from exc
        self.states.append(FakeGrammarState(choices, self._fail_at))
        return self.states[-1]
