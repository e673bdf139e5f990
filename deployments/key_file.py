"""API keys from outside the configuration: a file of hashes, usually a mounted Secret."""

import os
import re
from pathlib import Path

from deployments.config import AppConfig
from deployments.errors import ConfigError

KEYS_FILE = "FLASHRAY_API_KEYS_FILE"
LINE = re.compile(r"(?P<team>[\w.-]+):(?P<key_hash>[0-9a-f]{64})")


def with_mounted_keys(config: AppConfig) -> AppConfig:
    """The configuration plus the keys of the file that $FLASHRAY_API_KEYS_FILE names, if it is set.

    Raises ConfigError for a file that cannot be read or a key given to two teams.
    """
    named = os.environ.get(KEYS_FILE)
    if not named:
        return config
    hashes = dict(config.key_hashes)
    for key_hash, team in read_key_file(Path(named)).items():
        _add(hashes, key_hash, team, named)
    return config.model_copy(update={"key_hashes": hashes})


def read_key_file(file: Path) -> dict[str, str]:
    """Team by key hash from lines `team:sha256`; blank lines and lines with # are skipped.

    Raises ConfigError naming file and line, never their content: it may be a key by mistake.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: {KEYS_FILE} names it, but it cannot be read: {exc}") from exc
    hashes: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(
                f"{file}: line {number}: expected `team:sha256`, the SHA-256 of the key in 64 "
                "lower-case hex digits (printf %s KEY | sha256sum)"
            )
        _add(hashes, match["key_hash"], match["team"], f"{file}: line {number}")
    return hashes


def _add(hashes: dict[str, str], key_hash: str, team: str, place: str) -> None:
    owner = hashes.setdefault(key_hash, team)
    if owner != team:
        raise ConfigError(f"{place}: one key, {key_hash[:8]}…, for two teams: {owner} and {team}")
