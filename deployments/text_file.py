"""A user's text, as a model reads it."""

import sys
from pathlib import Path

from deployments.errors import ConfigError
from router.text.tokenizer import Tokenizer

STANDARD_INPUT = Path("-")


def read_text(file: Path) -> str:
    """Or what comes by STANDARD_INPUT. Raises ConfigError."""
    try:
        content = sys.stdin.buffer.read() if file == STANDARD_INPUT else file.read_bytes()
        return content.decode("utf-8")
    except OSError as exc:
        raise ConfigError(f"{file}: expected a text file, {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"{file}: expected UTF-8 text, at byte {exc.start}: {exc.reason}; convert it first"
        ) from exc


def begin_of_prompts(tokenizer: Tokenizer) -> list[int]:
    """The token that prompts of the model begin with, if they do with any."""
    begin = tokenizer.token_id(tokenizer.special_tokens.get("bos_token", ""))
    return [] if begin is None else [begin]
