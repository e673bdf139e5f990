"""The API key of a demo run: given, or made up and shown once; only its hash goes any further."""

import ipaddress
import os
import secrets
from dataclasses import dataclass

from deployments.config import AppConfig
from deployments.errors import ConfigError
from router.identity import hash_key

DEMO_KEY = "FLASHRAY_DEMO_KEY"
DEMO_TEAM = "demo"


@dataclass(frozen=True, slots=True)
class DemoKey:
    key: str
    was_given: bool


def demo_key(host: str) -> DemoKey:
    """Raises ConfigError for a chosen key on an interface that others can reach."""
    given = os.environ.get(DEMO_KEY)
    if not given:
        return DemoKey(f"sk-flashray-{secrets.token_urlsafe(24)}", was_given=False)
    if not is_loopback(host):
        raise ConfigError(
            f"{DEMO_KEY} is for this machine alone, but the host is {host}: unset it (a random "
            "key is made) or serve on 127.0.0.1"
        )
    return DemoKey(given, was_given=True)


def with_key(config: AppConfig, key: DemoKey) -> AppConfig:
    hashes = {**config.key_hashes, hash_key(key.key): DEMO_TEAM}
    return config.model_copy(update={"key_hashes": hashes})


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
