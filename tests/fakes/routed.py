"""The real router over scripted upstreams and a fake engine."""

from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from router.app import create_app
from router.backends.direct import DirectUpstream
from router.backends.pool import BackendPool
from router.backends.proxy import ProxyUpstream
from router.backends.upstream import UpstreamSettings
from router.config import RouterConfig
from router.identity import KeyRing, hash_key
from router.teams import Team
from tests.fakes.audit import MemorySink
from tests.fakes.backend import FakeBackend
from tests.fakes.router import KEY, MODEL, catalog
from tests.fakes.upstream import KEY as UPSTREAM_KEY
from tests.fakes.upstream import FakeUpstream

# Reading the tokenizer costs more than any of these tests.
_catalog = cache(catalog)

KEY_ENV = "FLASHRAY_TEST_UPSTREAM_KEY"
ALL = frozenset({"direct", "proxy", "gpt", "local"})
RED = Team("red", backends=ALL, egress=True)
SETTINGS = {
    "direct": UpstreamSettings("direct", "direct", "https://direct.test", api_key_env=KEY_ENV),
    "proxy": UpstreamSettings(
        "proxy", "proxy", "https://proxy.test", api_key_env=KEY_ENV, leaves_company=False
    ),
    "gpt": UpstreamSettings(
        "gpt", "proxy", "https://gpt.test", "openai", api_key_env=KEY_ENV, leaves_company=False
    ),
}
ROUTES: list[dict[str, Any]] = [
    {"model": "claude", "targets": [{"backend": "direct", "model": "claude-up"}]},
    {"model": "claude-proxy", "targets": [{"backend": "proxy", "model": "claude-up"}]},
    {"model": "gpt", "targets": [{"backend": "gpt", "model": "gpt-up"}]},
    {"model": "house", "targets": [{"backend": "local", "model": MODEL}]},
    {
        "model": "safe",
        "aliases": ["sonnet"],
        "targets": [{"backend": "proxy", "model": "up"}, {"backend": "local", "model": MODEL}],
    },
    {
        "model": "twice",
        "targets": [
            {"backend": "proxy", "model": "up"},
            {"backend": "gpt", "model": "gpt-up"},
            {"backend": "direct", "model": "up"},
        ],
        "egress": True,
    },
    {
        "model": "outward",
        "egress": True,
        "targets": [{"backend": "local", "model": MODEL}, {"backend": "direct", "model": "up"}],
    },
    {
        "model": "inward",
        "targets": [{"backend": "local", "model": MODEL}, {"backend": "direct", "model": "up"}],
    },
]


@dataclass
class Routed:
    """`upstreams` are the scripted ones by name."""

    folder: Path
    backend: FakeBackend
    teams: Sequence[Team] = (RED,)
    keep_alive_s: float = 10.0
    routes: Any = field(default_factory=lambda: ROUTES)
    limiter: Any = None

    def __post_init__(self) -> None:
        self.upstreams = {name: FakeUpstream() for name in SETTINGS}
        kinds = {"direct": DirectUpstream, "proxy": ProxyUpstream}
        self.pool = BackendPool(
            [
                kinds[settings.kind](settings, self.upstreams[name].transport())
                for name, settings in SETTINGS.items()
            ],
            self.routes,
        )
        self.sink = MemorySink()
        self.app = create_app(
            catalog=_catalog(self.folder),
            backend=self.backend,
            keys=KeyRing({hash_key(KEY): "red"}),
            teams=self.teams,
            config=RouterConfig(keep_alive_s=self.keep_alive_s),
            sink=self.sink,
            limiter=self.limiter,
            pool=self.pool,
        )

    @property
    def num_upstream_requests(self) -> int:
        return sum(len(upstream.seen) for upstream in self.upstreams.values())

    @asynccontextmanager
    async def client(self):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://router",
            headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"},
        ) as client:
            yield client


def claude_body(model: str, **changes: Any) -> dict[str, Any]:
    hello = [{"role": "user", "content": "Hello"}]
    return {"model": model, "max_tokens": 50, "messages": hello, **changes}


def gpt_body(model: str, **changes: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hello"}], **changes}


__all__ = ["KEY_ENV", "RED", "ROUTES", "UPSTREAM_KEY", "Routed", "claude_body", "gpt_body"]
