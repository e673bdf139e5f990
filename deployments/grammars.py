"""Grammars over the tokenizer of a served model, by llguidance. Handed to the engine, which knows
no text."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from deployments.model_files import open_model
from engine.errors import InvalidGrammar
from engine.grammar import Grammar, GrammarKind, num_mask_words
from router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# The library bounds what a grammar and one mask of it may cost; of its limits only this one is too
# wide: with its 250,000 states a sequence took 80 MB, and a mask 43 ms (CPU host).
MAX_LEXER_STATES = 50_000
MAX_REASON_CHARACTERS = 400
# Blanks as a model likes them, but none without end. (To llguidance 1.7, which vLLM pins, a row of
# such blanks is one more.)
JSON_BLANK = r"[\x20\x0A\x0D\x09]{1,64}"


class ModelGrammars:
    """A GrammarCompiler. `eos_token_ids` end a completion; `vocab_size` is that of the model, which
    may be wider than the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids[0]))
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=[*eos_token_ids])
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._num_mask_words = num_mask_words(vocab_size)

    @classmethod
    def of_model(cls, folder: Path) -> "ModelGrammars":
        """Of a converted model. Raises ModelFilesError: that of its files, or that of its text."""
        manifest = open_model(folder).manifest
        tokenizer = Tokenizer.from_folder(folder)
        return cls(tokenizer, manifest.vocab_size, manifest.eos_token_ids)

    def compile(self, grammar: Grammar) -> "MatcherState":
        """Takes a millisecond, 0.2 s for the widest, outside the GIL. Raises InvalidGrammar."""
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=self._limits)
        except (ValueError, RecursionError) as exc:
            raise _refusal(grammar, str(exc)) from exc
        self._try(matcher)
        if matcher.is_error():
            raise _refusal(grammar, _reason(matcher))
        return MatcherState(matcher)

    def _try(self, matcher: LLMatcher) -> None:
        """The first masks, before any step waits for one: a grammar that no text matches fails with
        the first, an object too wide for the limits where its keys begin."""
        mask = np.empty(self._num_mask_words, dtype=np.int32)
        if not matcher.is_error():
            _fill(matcher, mask)
        if not matcher.is_error():
            matcher.consume_tokens(self._tokenizer.tokenize_bytes(matcher.compute_ff_bytes()))
            _fill(matcher, mask)
        if not matcher.is_error():
            matcher.reset()


class MatcherState:
    """A GrammarState."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def fill(self, mask: NDArray[np.int32]) -> None:
        """A matcher that has failed allows what ends a completion, and nothing else."""
        _fill(self._matcher, mask)
        if self._matcher.is_error() and not self._has_failed:
            self._has_failed = True
            logger.warning("grammar failed reason=%s", _reason(self._matcher))

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class _Vocabulary:
    """A Tokenizer in the library's words. Ids that it lacks stand for no bytes: never allowed."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _fill(matcher: LLMatcher, mask: NDArray[np.int32]) -> None:
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _source(grammar: Grammar) -> str:
    """In the library's language. Raises ValueError, RecursionError."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.JSON_OBJECT:
            return _json_source({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict):
                raise ValueError(f"expected a JSON object, got {grammar.text[:80]!r}")
            schema.pop("x-guidance", None)  # the library's own switches: some give up validity
            return _json_source(schema)


def _json_source(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": JSON_BLANK}
    )


def _reason(matcher: LLMatcher) -> str:
    reason = matcher.get_error().replace("<non-verbose/>", "")
    return "no text matches it" if reason.startswith("NoExtension") else _one_line(reason)


def _refusal(grammar: Grammar, reason: str) -> InvalidGrammar:
    return InvalidGrammar(f"this {grammar.kind} cannot be followed: {_one_line(reason)}; change it")


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:MAX_REASON_CHARACTERS]
