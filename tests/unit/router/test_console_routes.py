"""The page, its files and the status behind it, over the in-process app."""

import re
from pathlib import Path

import httpx
import pytest

from router.app import create_app
from router.config import RouterConfig
from router.console_routes import FILES
from router.errors import LimiterUnavailable
from router.identity import KeyRing, Principal, hash_key
from router.status import LimitsOf
from tests.fakes.backend import FakeBackend
from tests.fakes.router import ALIAS, KEY, MODEL, catalog

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SIGNED_IN = {"x-api-key": KEY}


def client(
    smollm2_path: Path, backend: FakeBackend | None = None, limits_of: LimitsOf | None = None
) -> httpx.AsyncClient:
    app = create_app(
        catalog=catalog(smollm2_path),
        backend=backend or FakeBackend(),
        keys=KeyRing({hash_key(KEY): "red"}),
        config=RouterConfig(),
        limits_of=limits_of,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


async def test_browsers_get_the_page_and_others_json(smollm2_path):
    async with client(smollm2_path) as http:
        page = await http.get("/", headers=BROWSER)
        line = await http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == FILES["index.html"].content
    assert line.json() == {"name": "flashray", "models": [MODEL, ALIAS]}
    assert page.headers["vary"] == line.headers["vary"] == "accept"


@pytest.mark.parametrize("headers", [{}, BROWSER], ids=["probe", "browser"])
async def test_head_of_the_root_is_200(smollm2_path, headers):
    async with client(smollm2_path) as http:
        assert (await http.head("/", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("style.css", "text/css; charset=utf-8"),
        ("favicon.svg", "image/svg+xml"),
    ],
)
async def test_files_have_their_type_and_the_security_headers(smollm2_path, name, media_type):
    async with client(smollm2_path) as http:
        answer = await http.get(f"/console/{name}")
    assert answer.headers["content-type"] == media_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


async def test_unchanged_files_are_not_sent_again(smollm2_path):
    async with client(smollm2_path) as http:
        first = await http.get("/", headers=BROWSER)
        again = await http.get("/", headers=BROWSER | {"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "%2e%2e%2fapp.py", "..%2fapp.py"])
async def test_only_the_page_s_own_files_are_served(smollm2_path, name):
    async with client(smollm2_path) as http:
        answer = await http.get(f"/console/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere():
    page = FILES["index.html"].content.decode()
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", page) == []
    for name, file in FILES.items():
        links = re.findall(r"https?://[^\s\"'>)]+", file.content.decode())
        assert set(links) <= {
            "http://www.w3.org/2000/svg",
            "https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation",
        }, name
        markup = rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage"
        assert re.findall(markup, file.content) == [], name


async def test_status_needs_a_key(smollm2_path):
    async with client(smollm2_path) as http:
        answer = await http.get("/v1/status", headers={"x-api-key": "sk-wrong"})
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == "invalid API key: ask your platform team for one"


async def test_status_says_what_is_served_and_how_it_does(smollm2_path):
    async with client(smollm2_path) as http:
        answer = await http.get("/v1/status", headers=SIGNED_IN)
    body = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert 0 <= body.pop("uptime_s") < 60
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", body.pop("version"))
    assert body == {
        "name": "flashray",
        "team": "red",
        "models": [
            {
                "id": MODEL,
                "display_name": "SmolLM2",
                "aliases": [ALIAS],
                "max_model_len": 8192,
                "can_chat": True,
            }
        ],
        "ready": True,
        "reason": "",
        "engine": {
            "num_running": 0,
            "num_waiting": 0,
            "prompt_tokens_total": 0,
            "cached_tokens_total": 0,
            "completion_tokens_total": 0,
            "preemptions_total": 0,
        },
        "kv_tiers": [{"name": "device", "num_blocks": 10, "num_used_blocks": 10}],
        "cold_tier": {
            "spilled_blocks_total": 0,
            "dropped_blocks_total": 0,
            "restored_blocks_total": 0,
            "missed_blocks_total": 0,
            "corrupt_blocks_total": 0,
        },
        "limits": None,
        "limits_reason": "",
    }


async def test_status_of_an_engine_that_is_not_ready_is_still_an_answer(smollm2_path):
    async with client(smollm2_path, FakeBackend(ready=False)) as http:
        answer = await http.get("/v1/status", headers=SIGNED_IN)
    assert answer.status_code == 200
    assert (answer.json()["ready"], answer.json()["reason"]) == (False, "loading")


async def test_status_carries_the_limits_of_its_caller(smollm2_path):
    async def limits_of(principal: Principal) -> dict[str, dict[str, int]]:
        assert principal.team == "red"
        return {"requests_per_minute": {"limit": 60, "remaining": 41}}

    async with client(smollm2_path, limits_of=limits_of) as http:
        body = (await http.get("/v1/status", headers=SIGNED_IN)).json()
    assert body["limits"] == {"requests_per_minute": {"limit": 60, "remaining": 41}}


async def test_status_outlives_the_store_of_the_limits(smollm2_path):
    async def limits_of(_principal: Principal) -> None:
        raise LimiterUnavailable("the store of the limits does not answer")

    async with client(smollm2_path, limits_of=limits_of) as http:
        body = (await http.get("/v1/status", headers=SIGNED_IN)).json()
    assert body["limits"] is None
    assert body["limits_reason"] == "the store of the limits does not answer"
