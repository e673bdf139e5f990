"""The tokenizer: ids of a prompt, and what one token stands for."""

import json
import shutil

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from router.errors import ModelFilesError
from router.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer.from_folder(smollm2_path)


def tiny(decoder, **vocabulary):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, **vocabulary}, merges=[]))
    backend.decoder = decoder
    return Tokenizer(backend)


def test_special_tokens_spelled_in_a_text_become_their_ids(smollm2):
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == smollm2.token_id("<|im_start|>") == 1
    assert ids[-1] == smollm2.token_id("<|im_end|>") == 2
    assert {1, 2} <= smollm2.special_ids
    assert smollm2.decode(ids) == "user\nHi"


def test_nothing_is_added_to_a_text(smollm2):
    assert smollm2.encode("") == []
    text = "  naïve 🦊 \n\n{{ x }} </system>\t"
    assert smollm2.decode(smollm2.encode(text)) == text


def test_named_special_tokens_come_from_the_folder(smollm2):
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.special_tokens["bos_token"] == "<|im_start|>"


def test_token_bytes_join_to_the_bytes_of_the_text(smollm2):
    text = "Grüße, 世界 🦊🏳️‍🌈 <script>"
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()
    assert any(smollm2.token_text(token_id) == "\ufffd" for token_id in smollm2.encode("🦊"))


def test_a_special_token_shows_as_its_name_and_an_unknown_id_as_nothing(smollm2):
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(10**6) == b""
    assert not smollm2.is_visible(10**6)
    assert smollm2.vocabulary_size == 49_152


def test_an_added_token_of_a_byte_level_vocabulary_is_plain_text():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<日本 x>"])
    tokenizer = Tokenizer(backend)
    (added,) = tokenizer.encode("<日本 x>")
    assert tokenizer.token_text(added) == "<日本 x>" == tokenizer.decode([added])


def test_bytes_and_spaces_of_a_byte_fallback_vocabulary():
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = tiny(decoder, **{"▁a": 1, "<0xE2>": 2})
    assert tokenizer.token_bytes(1) == b" a"
    assert tokenizer.token_bytes(2) == b"\xe2"
    assert tokenizer.is_byte(2)
    assert not tokenizer.is_byte(1)
    assert tokenizer.decode([1, 1]) == "a a"
    assert tokenizer.decode_inside([1, 1]) == " a a"


def test_truncation_and_padding_of_the_file_are_off(smollm2_path, tmp_path):
    backend = tokenizers.Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer.encode("one two three four five six")) == 6
    assert len(tokenizer.encode("one")) == 1
    assert tokenizer.special_tokens == {}


def test_named_tokens_may_be_objects(smollm2_path, tmp_path):
    shutil.copy(smollm2_path / "tokenizer.json", tmp_path)
    config = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).special_tokens == {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize("content", [None, "", "{}", "[1]"])
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_configuration_is_refused(smollm2_path, tmp_path, content):
    shutil.copy(smollm2_path / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("decoder", [decoders.BPEDecoder(), decoders.Strip(" ", 0, 1), None])
def test_a_decoder_that_cannot_be_followed_is_refused(decoder):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelFilesError, match="decoder"):
        Tokenizer(backend)
