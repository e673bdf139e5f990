"""The detokenizer: nothing too early, nothing too late, and how little it decodes."""

import pytest
import tokenizers
from tokenizers import decoders, models

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer.from_folder(smollm2_path)


def byte_fallback(tokenizer_type=Tokenizer):
    texts = ["<unk>", "a", "▁", "▁the", "x", "."]
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer_type(backend)


class CountingTokenizer(Tokenizer):
    """Counts the ids that are decoded."""

    num_decoded = 0

    def decode(self, token_ids):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)

    def token_bytes(self, token_id):
        self.num_decoded += 1
        return super().token_bytes(token_id)


def bytes_of(tokenizer, raw):
    return [tokenizer.token_id(f"<0x{byte:02X}>") for byte in raw]


def test_a_character_appears_when_its_last_byte_does(smollm2):
    ids = smollm2.encode("a🦊b")
    detokenizer = Detokenizer(smollm2)
    pieces = [detokenizer.add([token_id]) for token_id in ids]
    assert pieces[0] == "a"
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == ["a", "🦊", "b"]
    assert detokenizer.finish() == ""


def test_an_incomplete_character_is_replaced_at_the_end_only(smollm2):
    ids = smollm2.encode("🦊")[:-1]
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.add(ids) == ""
    assert detokenizer.finish() == smollm2.decode(ids) == "\ufffd"


def test_special_and_unknown_ids_show_as_nothing(smollm2):
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.add([1, *smollm2.encode("hi"), 2, 10**6]) == "hi"
    assert detokenizer.add([]) == ""


def test_only_the_first_space_of_a_text_is_dropped():
    tokenizer = byte_fallback()
    the = tokenizer.token_id("▁the")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([the]), detokenizer.add([the])] == ["the", " the"]


def test_a_lone_first_space_is_settled_by_what_follows():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_id("▁"), tokenizer.token_id("▁the")]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([token_id]) for token_id in ids] == ["", " the"]
    assert tokenizer.decode(ids) == " the"


def test_a_run_of_bytes_waits_for_its_end():
    tokenizer = byte_fallback()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([token_id]) for token_id in bytes_of(tokenizer, "€é".encode())]
    assert pieces == [""] * 5
    assert detokenizer.add([tokenizer.token_id("x")]) == "€éx"


def test_one_bad_byte_spoils_its_whole_run_as_in_a_whole_decode():
    tokenizer = byte_fallback()
    ids = [*bytes_of(tokenizer, b"\xe2\x82\xac\x80"), tokenizer.token_id("x")]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add([token_id]) for token_id in ids)
    assert text == tokenizer.decode(ids) == "\ufffd" * 4 + "x"


def test_an_invisible_id_does_not_end_a_run_of_bytes():
    tokenizer = byte_fallback()
    first, *rest = bytes_of(tokenizer, "€".encode())
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add([first, 10**6]) == ""
    assert detokenizer.add(rest) + detokenizer.finish() == "€"


@pytest.mark.parametrize("vocabulary", ["byte level", "byte fallback"])
def test_each_id_is_decoded_a_bounded_number_of_times(vocabulary, smollm2_path):
    if vocabulary == "byte level":
        tokenizer = CountingTokenizer.from_folder(smollm2_path)
        ids = tokenizer.encode("The quick 🦊 jumps. ") * 500
    else:
        tokenizer = byte_fallback(CountingTokenizer)
        the = tokenizer.token_id("▁the")
        ids = [the, *bytes_of(tokenizer, "🦊".encode())] * 1_000
    whole = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer)
    tokenizer.num_decoded = 0
    text = "".join(detokenizer.add([token_id]) for token_id in ids) + detokenizer.finish()
    assert text == whole
    assert tokenizer.num_decoded <= 2 * len(ids) + 2
