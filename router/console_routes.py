"""The page at `/`: its static files, with their types and the headers that keep it harmless."""

import hashlib
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.errors import NotFound

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Trusted types make the browser itself refuse text as markup, should the page ever try.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> "StaticFile":
        return cls(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')

    def answer(self, request: Request) -> Response:
        """Always asked for again, so that a new release shows at once; unchanged costs no body."""
        headers = {
            **SECURITY_HEADERS,
            "etag": self.etag,
            "cache-control": "no-cache",
            "vary": "accept",
        }
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def _static_files() -> dict[str, StaticFile]:
    folder = importlib.resources.files("router") / "console"
    return {
        file.name: StaticFile.of(file.read_bytes(), suffix)
        for file in folder.iterdir()
        if (suffix := "." + file.name.rpartition(".")[2]) in MEDIA_TYPES
    }


FILES = _static_files()


def accepts_page(headers: Mapping[str, str]) -> bool:
    """Browsers name HTML; SDKs, probes and curl do not."""
    return "text/html" in headers.get("accept", "").lower()


def console_page(request: Request) -> Response:
    return FILES["index.html"].answer(request)


async def console_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        raise NotFound(f"console/{name}: no such file; open / for the page")
    return FILES[name].answer(request)


CONSOLE_ROUTES = (Route("/console/{name}", console_file),)
