"""JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from router.errors import ModelFilesError


def read_json(path: Path) -> dict[str, Any]:
    """An absent file says nothing: {}. Raises ModelFilesError when one that is there is not a JSON
    object."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ModelFilesError(f"expected JSON in {path}: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelFilesError(f"expected a JSON object in {path}, got {type(content).__name__}")
    return content
