"""The official Claude client over one of three forms of deployment. What is asked of it stays the
same: `client.messages.create(...)`, `client.messages.stream(...)`."""

import contextlib
import os
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import anthropic
from anthropic.resources.messages import Messages
from anthropic.resources.models import Models

Mode = Literal["direct", "proxy", "local"]

DIRECT_URL = "https://api.anthropic.com"
LOCAL_URL = "http://127.0.0.1:8000"
KEY_VARIABLES: dict[Mode, str] = {
    "direct": "ANTHROPIC_API_KEY",
    "proxy": "FLASHRAY_API_KEY",
    "local": "FLASHRAY_API_KEY",
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry in this process. `api_key` opens it, and nothing else does."""

    url: str
    api_key: str


ServeModel = Callable[[Path], AbstractContextManager[ServedModel]]
"""Serves the model of a path in this process until it is closed: `deployments.in_process`."""


class FlashrayClient:
    """`direct` asks Claude, `proxy` a gateway at `base_url`, `local` a Flashray at `base_url`, or
    the model of `local_model_path`, which `serve_model` then serves in this process.

    A key that is not given comes from ANTHROPIC_API_KEY (direct) or FLASHRAY_API_KEY: a key for
    Claude is sent nowhere else. Close it, or use it as a context manager. Raises ValueError for
    arguments that do not belong together.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        team_id: str | None = None,
        ca_file: Path | None = None,
        local_model_path: Path | None = None,
        serve_model: ServeModel | None = None,
        max_retries: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        _check(mode, base_url, local_model_path, serve_model)
        self.mode = mode
        with contextlib.ExitStack() as stack:
            if local_model_path is not None and serve_model is not None:
                served = stack.enter_context(serve_model(local_model_path))
                base_url, api_key = served.url, served.api_key
            http_client = None
            if ca_file is not None:
                context = ssl.create_default_context(cafile=str(ca_file))
                http_client = anthropic.DefaultHttpxClient(verify=context)
            self._claude = anthropic.Anthropic(
                api_key=api_key or _key_of(mode),
                base_url=base_url or (DIRECT_URL if mode == "direct" else LOCAL_URL),
                default_headers={} if team_id is None else {"X-Anthropic-Team-ID": team_id},
                http_client=http_client,
                max_retries=max_retries,
                timeout=timeout_s,
            )
            stack.callback(self._claude.close)
            self._held = stack.pop_all()

    @property
    def messages(self) -> Messages:
        return self._claude.messages

    @property
    def models(self) -> Models:
        return self._claude.models

    def close(self) -> None:
        """Ends what was started for this client; idempotent."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check(
    mode: Mode, base_url: str | None, model_path: Path | None, serve_model: ServeModel | None
) -> None:
    if mode not in KEY_VARIABLES:
        raise ValueError(f"mode: expected one of {', '.join(KEY_VARIABLES)}, got {mode!r}")
    if mode == "proxy" and base_url is None:
        raise ValueError("base_url: proxy mode needs the address of the gateway")
    if model_path is None and serve_model is None:
        return
    if mode != "local" or base_url is not None:
        raise ValueError("local_model_path: only for local mode without a base_url")
    if model_path is None or serve_model is None:
        raise ValueError(
            "local_model_path and serve_model go together: pass "
            "serve_model=deployments.in_process.serve_model"
        )


def _key_of(mode: Mode) -> str:
    variable = KEY_VARIABLES[mode]
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"api_key: pass one, or set {variable}")
    return key
