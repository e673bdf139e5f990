"""Server-sent events: values, and their bytes.

A keep-alive is a comment of ONE line without a blank line after it: some client SDKs read a blank
line after a bare comment as an empty event and fail (openai-python#2722).
"""

import codecs
from dataclasses import dataclass

from router.errors import BackendError

KEEP_ALIVE = b": ka\n"
MAX_EVENT_CHARACTERS = 8 * 2**20


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """`data` is sent as one `data:` line per line of text. `id` only for clients that resume.

    Raises ValueError for text the wire cannot carry: a carriage return, or a line break in `event`
    or `id`.
    """

    data: str
    event: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        for name, text in (("event", self.event), ("id", self.id)):
            if text is not None and ("\n" in text or "\r" in text or "\0" in text):
                raise ValueError(f"expected `{name}` on one line and without NUL, got {text!r}")
        if "\r" in self.data:
            raise ValueError("expected `data` without carriage returns; JSON escapes them")


def encode_event(event: ServerSentEvent) -> bytes:
    lines = []
    if event.event is not None:
        lines.append(f"event: {event.event}")
    if event.id is not None:
        lines.append(f"id: {event.id}")
    lines.extend(f"data: {line}" for line in event.data.split("\n"))
    return ("\n".join(lines) + "\n\n").encode()


class EventDecoder:
    """Bytes of a stream, in chunks cut anywhere, to its events.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    with one difference: `ServerSentEvent.id` is the event's own, and `last_event_id` is the one
    that stays. Comments and `retry` are dropped. An event without its closing blank line does not
    count. Raises BackendError when one event grows beyond `max_event_characters`.
    """

    def __init__(self, max_event_characters: int = MAX_EVENT_CHARACTERS) -> None:
        self.last_event_id: str | None = None
        self._max_event_characters = max_event_characters
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_at_start = True
        self._ends_in_return = False
        self._unfinished: list[str] = []
        self._num_unfinished = 0
        self._num_data = 0
        self._fields: dict[str, str] = {}
        self._lines: list[str] = []

    def decode(self, chunk: bytes) -> list[ServerSentEvent]:
        text = self._utf8.decode(chunk)
        if self._is_at_start and text:
            self._is_at_start = False
            text = text.removeprefix("\ufeff")
        events = [event for line in self._split(text) if (event := self._take(line)) is not None]
        self._check_size()
        return events

    def _split(self, text: str) -> list[str]:
        """Whole lines, ended by LF, CR or CRLF; what follows the last one waits."""
        # A CR ends its line at once; the LF that may follow in the next chunk belongs to it.
        if text and self._ends_in_return:
            text = text.removeprefix("\n")
            self._ends_in_return = False
        if not text:
            return []
        self._ends_in_return = text.endswith("\r")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._unfinished.append(lines[0])
        if len(lines) == 1:
            self._num_unfinished += len(lines[0])
            return []
        lines[0] = "".join(self._unfinished)
        self._unfinished = [lines.pop()]
        self._num_unfinished = len(self._unfinished[0])
        return lines

    def _take(self, line: str) -> ServerSentEvent | None:
        if line == "":
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._lines.append(value)
            self._num_data += len(value)
        elif name == "event" or (name == "id" and "\0" not in value):
            self._fields[name] = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        fields, lines = self._fields, self._lines
        self._fields, self._lines, self._num_data = {}, [], 0
        self.last_event_id = fields.get("id", self.last_event_id)
        if not lines:
            return None
        event = fields.get("event", "").replace("\0", "") or None
        return ServerSentEvent("\n".join(lines), event, fields.get("id"))

    def _check_size(self) -> None:
        if self._num_unfinished + self._num_data > self._max_event_characters:
            raise BackendError(
                f"expected server-sent events of at most {self._max_event_characters} characters, "
                "got a longer one; raise max_event_characters or ask the backend for smaller events"
            )
