"""Whatever the ids and wherever they are cut, the pieces join to the whole decode."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer

NUM_SMOLLM2_IDS = 49_152


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer.from_folder(smollm2_path)


@pytest.fixture(scope="module")
def smollm2_bytes(smollm2):
    """Ids that stand for part of a character."""
    ids = range(NUM_SMOLLM2_IDS)
    return [token_id for token_id in ids if "\ufffd" in smollm2.token_text(token_id)]


def byte_fallback(decoder):
    texts = ["<unk>", "<s>", "a", "▁", "▁the", "x", "▁▁", "é", "##y"]
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    # Enough bytes to make whole, cut and impossible characters often.
    for byte in (0x20, 0x41, 0x80, 0x82, 0xA0, 0xAC, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<tool call>"])
    return Tokenizer(backend)


LLAMA = byte_fallback(
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
)
GEMMA = byte_fallback(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
)
METASPACE = byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
WORD_PIECE = byte_fallback(decoders.WordPiece())


def assert_pieces_join(tokenizer, batches):
    ids = [token_id for batch in batches for token_id in batch]
    whole = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for batch in batches:
        shown += detokenizer.add(batch)
        assert whole.startswith(shown)
    assert shown + detokenizer.finish() == whole


def batches_of(ids):
    return st.lists(st.lists(ids, max_size=4), max_size=12)


@given(batches=batches_of(st.integers(0, NUM_SMOLLM2_IDS + 50)))
@settings(max_examples=500, deadline=None)
def test_real_vocabulary(smollm2, batches):
    assert_pieces_join(smollm2, batches)


@given(batches=batches_of(st.integers(0, 10_000)))
@settings(max_examples=500, deadline=None)
def test_real_vocabulary_broken_characters(smollm2, smollm2_bytes, batches):
    ids = [[smollm2_bytes[index % len(smollm2_bytes)] for index in batch] for batch in batches]
    assert_pieces_join(smollm2, ids)


@given(text=st.text(max_size=40), sizes=st.lists(st.integers(1, 5), max_size=30))
@settings(max_examples=500, deadline=None)
def test_real_text_never_shows_a_replacement_character(smollm2, text, sizes):
    ids = smollm2.encode(text)
    # A few characters have a byte that this vocabulary lacks: they do not come back.
    whole = smollm2.decode(ids)
    detokenizer = Detokenizer(smollm2)
    pieces = []
    for size in sizes:
        pieces.append(detokenizer.add(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.add(ids))
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == whole


@pytest.mark.parametrize(
    "tokenizer",
    [LLAMA, GEMMA, METASPACE, WORD_PIECE],
    ids=["llama", "gemma", "metaspace", "word_piece"],
)
@given(batches=batches_of(st.integers(0, 24)))
@settings(max_examples=500, deadline=None)
def test_byte_fallback_vocabularies(tokenizer, batches):
    assert_pieces_join(tokenizer, batches)
