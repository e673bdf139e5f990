"""Server-sent events: values, and their bytes.

A keep-alive is a comment of ONE line without a blank line after it: some client SDKs read a blank
line after a bare comment as an empty event and fail (openai-python#2722).
"""

from dataclasses import dataclass

KEEP_ALIVE = b": ka\n"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """`data` is sent as one `data:` line per line of text. `id` only for clients that resume."""

    data: str
    event: str | None = None
    id: str | None = None


def encode_event(event: ServerSentEvent) -> bytes:
    lines = []
    if event.event is not None:
        lines.append(f"event: {event.event}")
    if event.id is not None:
        lines.append(f"id: {event.id}")
    lines.extend(f"data: {line}" for line in event.data.split("\n"))
    return ("\n".join(lines) + "\n\n").encode()
