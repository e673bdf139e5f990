"""Upstream backends as a configuration names them. Their keys stay in the environment or in mounted
files: a configuration says where, never what."""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from router.backends.direct import DirectUpstream
from router.backends.proxy import ProxyUpstream
from router.backends.upstream import Upstream, UpstreamSettings
from router.routes import LOCAL

DIRECT_URL = "https://api.anthropic.com"
_KEY_FIELDS = {"api_key_env", "api_key_file"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class BackendSettings(BaseModel):
    """`direct` is Claude itself; `proxy` is a gateway of the company, or any server that speaks one
    of the two dialects. `leaves_company` null: direct does, a proxy does not."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    kind: Literal["direct", "proxy"]
    url: str = ""
    protocol: Literal["anthropic", "openai"] = "anthropic"
    api_key_env: str | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    leaves_company: bool | None = None
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60)
    stall_timeout_s: float = Field(default=60.0, gt=0)
    answer_timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _holds_no_key(cls, fields: Any) -> Any:
        names = {str(name) for name in fields} if isinstance(fields, dict) else set()
        if any("key" in name or "token" in name for name in names - _KEY_FIELDS):
            raise ValueError(
                "keys never stand in a configuration: name an environment variable in api_key_env "
                "or a mounted file in api_key_file"
            )
        return fields

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError("expected the name of an environment variable, never a key itself")
        return name

    @model_validator(mode="after")
    def _can_be_reached_safely(self) -> Self:
        if self.name == LOCAL:
            raise ValueError("the name `local` is that of the engine; choose another")
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file: name one of them")
        if self.kind == "direct" and self.protocol != "anthropic":
            raise ValueError("a direct backend speaks anthropic; use kind: proxy")
        if self.kind == "proxy" and not self.url:
            raise ValueError("url: a proxy needs one")
        _check_url(self.url or DIRECT_URL, needs_tls=self.kind == "direct")
        return self


def upstreams_of(backends: Sequence[BackendSettings]) -> list[Upstream]:
    return [_upstream(backend) for backend in backends]


def _upstream(backend: BackendSettings) -> Upstream:
    is_direct = backend.kind == "direct"
    leaves = is_direct if backend.leaves_company is None else backend.leaves_company
    fields = backend.model_dump()
    url = (backend.url or DIRECT_URL).rstrip("/")
    settings = UpstreamSettings(**{**fields, "url": url, "leaves_company": leaves})
    return DirectUpstream(settings) if is_direct else ProxyUpstream(settings)


def _check_url(url: str, needs_tls: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("url: expected https://HOST[:PORT][/PATH]")
    if parts.username or parts.password or parts.query:
        raise ValueError("url: expected no user, password or query in it")
    if needs_tls and parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError("url: a direct backend is reached by https only")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
