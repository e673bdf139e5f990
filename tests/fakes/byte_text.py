"""The byte-level tokenizer of the small checkpoints, and what a grammar lets through."""

from functools import cache

import numpy as np

from deployments.grammars import ModelGrammars
from engine.grammar import GrammarState, num_mask_words
from router.text.tokenizer import Tokenizer
from tests.fakes.checkpoint import byte_tokenizer

EOS = 0  # "!": no text of the tests has one
VOCAB_SIZE = 300  # wider than the tokenizer's, as vocabularies of checkpoints are


@cache
def byte_text() -> Tokenizer:
    return Tokenizer(byte_tokenizer().backend_tokenizer)


@cache
def byte_grammars() -> ModelGrammars:
    return ModelGrammars(byte_text(), VOCAB_SIZE, [EOS])


def allowed_ids(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = np.full(num_mask_words(vocab_size), -1, dtype=np.int32)
    state.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
