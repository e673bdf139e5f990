"""Token ids to text as they arrive, equal to decoding them all at once.

Each id is decoded once or twice, never the whole history. Text is held back only while later
tokens could still change it.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

from router.text.tokenizer import Tokenizer


class Detokenizer:
    """One completion's ids, in order, to its text: `add` any number of times, then `finish` once.

    Special tokens and ids outside the vocabulary show as nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces: _Pieces = (
            _BytePieces(tokenizer) if tokenizer.is_byte_level else _TextPieces(tokenizer)
        )

    def add(self, token_ids: Iterable[int]) -> str:
        return self._pieces.add(token_ids)

    def finish(self) -> str:
        """What was held back: an incomplete character becomes U+FFFD, as in a whole decode."""
        return self._pieces.finish()


class _Pieces(Protocol):
    def add(self, token_ids: Iterable[int]) -> str: ...
    def finish(self) -> str: ...


class _BytePieces:
    """Byte-level vocabularies: every token is bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._tokenizer.visible_bytes, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TextPieces:
    """Vocabularies of text with bytes as a fallback.

    The decoder turns a whole run of byte tokens into replacement characters when the run is not
    valid UTF-8, so a run has no text before the token that ends it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []
        self._is_inside = False

    def add(self, token_ids: Iterable[int]) -> str:
        # An invisible id inside a run of bytes does not end the run: it must go before, not after.
        visible = list(filter(self._tokenizer.is_visible, token_ids))
        run_end = self._num_settled(visible)
        if run_end == 0:
            self._held.extend(visible)
            return ""
        settled = self._held + visible[:run_end]
        text = self._decode(settled)
        # Until the first character is out, the decoder may still owe the dropping of a space.
        self._held = visible[run_end:] if self._is_inside else settled + visible[run_end:]
        return text

    def finish(self) -> str:
        text = self._decode(self._held)
        self._held = []
        return text

    def _num_settled(self, token_ids: list[int]) -> int:
        """How many of `token_ids` precede the run of bytes that is still open at their end."""
        for count in range(len(token_ids), 0, -1):
            if not self._tokenizer.is_byte(token_ids[count - 1]):
                return count
        return 0

    def _decode(self, token_ids: list[int]) -> str:
        if self._is_inside:
            return self._tokenizer.decode_inside(token_ids)
        text = self._tokenizer.decode(token_ids)
        self._is_inside = text != ""
        return text
