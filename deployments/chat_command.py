"""`flashray chat`: a streamed conversation in the terminal, through the official SDK."""

import sys
from typing import TYPE_CHECKING

import anthropic

from deployments.errors import DeploymentError

if TYPE_CHECKING:
    from anthropic.types import MessageParam


def chat(url: str, key: str | None, model: str | None, max_tokens: int) -> int:
    """Reads questions until end of file or Ctrl-C. Raises DeploymentError."""
    if not key:
        raise DeploymentError("chat needs a key: --key KEY, or FLASHRAY_DEMO_KEY")
    client = anthropic.Anthropic(base_url=url, auth_token=key, api_key=None)
    try:
        model = model or client.models.list().data[0].id
        print(f"{model} at {url}; Ctrl-D ends", file=sys.stderr)
        _converse(client, model, max_tokens)
    except anthropic.APIConnectionError as exc:
        raise DeploymentError(f"{url} cannot be reached: is `make serve` running?") from exc
    except anthropic.APIStatusError as exc:
        raise DeploymentError(f"{url} answered {exc.status_code}: {exc.message}") from exc
    return 0


def _converse(client: anthropic.Anthropic, model: str, max_tokens: int) -> None:
    turns: list[MessageParam] = []
    while (question := _ask()) is not None:
        turns.append({"role": "user", "content": question})
        parts: list[str] = []
        with client.messages.stream(model=model, max_tokens=max_tokens, messages=turns) as stream:
            for text in stream.text_stream:
                parts.append(text)
                print(text, end="", flush=True)
        print()
        turns.append({"role": "assistant", "content": "".join(parts) or "(nothing)"})


def _ask() -> str | None:
    """The next line that says something; None at the end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if line.strip():
            return line
