"""Text to token ids and back, from a model folder's tokenizer.json.

Only the `tokenizers` library: `transformers` would bring torch into the router.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from router.errors import ModelFilesError
from router.text.byte_level import BYTE_OF_CHARACTER
from router.text.model_folder import read_json

_ANCHOR_TEXTS = ("a", "A", "0", "▁a", "▁A", ".")
# Of the parts of a decoder, those whose output for a token depends on no later token, apart from a
# run of bytes. A decoder outside this list could not be followed token by token.
_INCREMENTAL_DECODERS = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class Tokenizer:
    """Immutable and safe to share between threads.

    `special_tokens` are the named ones a chat template may use (bos_token, ...), by name.
    `special_ids` never show in a text.
    Raises ModelFilesError when the folder's files cannot be used.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        decoder_types = _decoder_types(json.loads(backend.to_str())["decoder"])
        self.is_byte_level = decoder_types == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in decoder_types
        self._visible_bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception for every fault of the file
            raise ModelFilesError(
                f"expected a tokenizer of the `tokenizers` library in {path}: {exc}"
            ) from exc
        return cls(backend, _named_tokens(read_json(folder / "tokenizer_config.json")))

    @property
    def vocabulary_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Adds nothing: what a chat template wants at the start or end, it writes itself. Special
        tokens spelled out in `text` become their ids."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens; ids outside the vocabulary stand for nothing."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def is_visible(self, token_id: int) -> bool:
        """Whether `decode` looks at the id: it is in the vocabulary and not special."""
        return token_id not in self.special_ids and self._backend.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a lone byte of a byte-fallback vocabulary, such as <0xE2>."""
        return token_id in self._byte_of_id

    def token_bytes(self, token_id: int) -> bytes:
        """What one token contributes inside a text: perhaps part of a character. A special token
        shows as its name; an id outside the vocabulary as nothing."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return bytes(token, "utf-8")
        if self.is_byte_level:
            return _byte_level_bytes(token)
        if token_id in self._byte_of_id:
            return bytes([self._byte_of_id[token_id]])
        return self.decode_inside([token_id]).encode()

    def visible_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, remembered; nothing of what is not visible."""
        found = self._visible_bytes.get(token_id)
        if found is None:
            found = self.token_bytes(token_id) if self.is_visible(token_id) else b""
            self._visible_bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def decode_inside(self, token_ids: Sequence[int]) -> str:
        """Decode as the middle of a text, where a decoder no longer drops the first space."""
        anchor_id, anchor_text = self._anchor
        return self.decode([anchor_id, *token_ids])[len(anchor_text) :]

    @cached_property
    def _byte_of_id(self) -> dict[int, int]:
        if not self._has_byte_fallback:
            return {}
        ids = ((self.token_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {token_id: byte for token_id, byte in ids if token_id is not None}

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """A token that stands before others to make them the middle of a text."""
        for token in _ANCHOR_TEXTS:
            token_id = self.token_id(token)
            if token_id is not None and token_id not in self.special_ids:
                return token_id, self.decode([token_id])
        raise ModelFilesError(
            f"expected one of the tokens {_ANCHOR_TEXTS} in the vocabulary, found none; "
            "this tokenizer cannot be decoded token by token"
        )


def _decoder_types(decoder: dict[str, Any] | None) -> list[str]:
    """Raises ModelFilesError for a decoder whose text cannot be followed token by token."""
    parts = list(_parts(decoder))
    types = [part["type"] for part in parts]
    is_incremental = _INCREMENTAL_DECODERS.issuperset(types) and not any(
        part.get("stop") for part in parts
    )
    if types == ["ByteLevel"] or (types and is_incremental):
        return types
    raise ModelFilesError(
        f"expected ByteLevel or some of {sorted(_INCREMENTAL_DECODERS)} as the decoder in "
        f"tokenizer.json, got {decoder}; serve a model whose tokenizer has one of these"
    )


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def _byte_level_bytes(token: str) -> bytes:
    # An added token is spelled in plain text; the decoder takes it so when a character of it
    # stands for no byte.
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: config.get(name) for name in _SPECIAL_TOKEN_NAMES}
    texts = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in named.items()
    }
    return {name: text for name, text in texts.items() if text is not None}
