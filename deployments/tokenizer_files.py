"""The text half of a model folder, as the router reads it without transformers."""

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer.json`, `special_tokens.json` and, where the model has one,
    `chat_template.jinja`, from a transformers fast tokenizer."""
    tokenizer.save_pretrained(folder)
    special = {name: getattr(tokenizer, name, None) for name in SPECIAL_TOKENS}
    known = {name: str(token) for name, token in special.items() if token is not None}
    (folder / "special_tokens.json").write_text(json.dumps(known, indent=2) + "\n")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        (folder / "chat_template.jinja").write_text(template)
