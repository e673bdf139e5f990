"""Where the fields of a JSON object stand in its bytes: what is patched is one value, and every
other byte stays as the client wrote it, key order, escapes, floats and repeated keys included."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # C, and public in all but name
from typing import Any

from router.errors import InvalidRequest

_SPACE = " \t\n\r"
# Whole numbers as floats: thousands of digits cost nothing, and none of these numbers is sent on.
_DECODER = json.JSONDecoder(parse_int=float)


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    value: Any
    start: int  # in characters of the text
    end: int


class RequestBody:
    """A client's JSON object. Repeated keys: the last one counts, as for most readers.

    Raises InvalidRequest for what is no JSON object, or has no `model`.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            self._text = content.decode()
            fields = list(_fields(self._text))
        except (ValueError, RecursionError) as exc:
            fault = str(exc) if isinstance(exc, json.JSONDecodeError) else "it cannot be read"
            raise InvalidRequest(f"The request body is not valid JSON: {fault}") from None
        self._models = [field for field in fields if field.name == "model"]
        self._values = {field.name: field.value for field in fields}
        model = self._values.get("model")
        if not isinstance(model, str) or not model:
            raise InvalidRequest("model: expected the name of a model", param="model")
        self.model = model

    @property
    def is_stream(self) -> bool:
        return self._values.get("stream") is True

    @property
    def max_tokens(self) -> int | None:
        """None when there is no usable limit; the upstream says what is wrong with it."""
        for name in ("max_tokens", "max_completion_tokens"):
            value = self._values.get(name)
            if isinstance(value, float) and 0 <= value < 1e9:
                return int(value)
        return None

    def with_model(self, model: str) -> bytes:
        """The same bytes, but for the model's name; the very same when it is that already."""
        if all(field.value == model for field in self._models):
            return self.content
        parts, end = [], 0
        for field in self._models:
            parts += [self._text[end : field.start], json.dumps(model)]
            end = field.end
        return "".join([*parts, self._text[end:]]).encode()


def _fields(text: str) -> Iterator[Field]:
    """The fields of the object that `text` is. Raises JSONDecodeError."""
    position = _expect(text, _skip(text, 0), "{")
    if text[position : position + 1] == "}":
        _end(text, position + 1)
        return
    while True:
        name, position = scanstring(text, _expect_at(text, position, '"'))
        start = _expect(text, _skip(text, position), ":")
        value, end = _DECODER.raw_decode(text, start)
        yield Field(name, value, start, end)
        position = _skip(text, end)
        if text[position : position + 1] == "}":
            _end(text, position + 1)
            return
        position = _expect(text, position, ",")


def _expect(text: str, position: int, character: str) -> int:
    """Past the character and the space behind it."""
    return _skip(text, _expect_at(text, position, character))


def _expect_at(text: str, position: int, character: str) -> int:
    if text[position : position + 1] != character:
        raise json.JSONDecodeError(f"Expecting {character!r}", text, position)
    return position + 1


def _skip(text: str, position: int) -> int:
    while text[position : position + 1] and text[position] in _SPACE:
        position += 1
    return position


def _end(text: str, position: int) -> None:
    if _skip(text, position) != len(text):
        raise json.JSONDecodeError("Extra data", text, position)
