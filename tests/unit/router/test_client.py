"""One constructor argument switches the form of deployment; the calls stay the same."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.client import FlashrayClient, ServedModel
from tests.fakes.backend import FakeBackend
from tests.fakes.router import KEY, MODEL, router_app, served
from tests.fakes.upstream import FakeUpstream, stream, whole

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
IDS = (504, 3575, 282, 4649, 314, 2)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch) -> None:
    for variable in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("FLASHRAY_API_KEY", raising=False)


def conversation(client: FlashrayClient, model: str) -> tuple[str, str]:
    """The lines of a program that does not know its deployment."""
    message = client.messages.create(model=model, max_tokens=20, messages=QUESTION)
    with client.messages.stream(model=model, max_tokens=20, messages=QUESTION) as events:
        streamed = "".join(events.text_stream)
    return message.content[0].text, streamed


@pytest.mark.parametrize("mode", ["direct", "proxy"])
def test_direct_and_proxy(mode):
    upstream = FakeUpstream()
    upstream.script(whole("anthropic_whole.json"), stream("anthropic_text"))
    with (
        upstream.served() as url,
        FlashrayClient(mode, api_key="sk-up", base_url=url, team_id="red") as client,
    ):
        answers = conversation(client, "claude-up")
    assert answers == ("Paris é — 巴黎", "Paris is the capital of France.")
    for seen in upstream.seen:
        assert seen.headers["x-anthropic-team-id"] == "red"
        assert "sk-up" in seen.headers.get("authorization", "") + seen.headers.get("x-api-key", "")


def test_local_over_a_running_router(smollm2_path: Path):
    app = router_app(smollm2_path, FakeBackend(token_ids=IDS))
    with served(app) as url, FlashrayClient("local", api_key=KEY, base_url=url) as client:
        whole_text, streamed = conversation(client, MODEL)
        assert whole_text == streamed != ""
        assert next(iter(client.models.list())).id == MODEL


def test_local_with_a_model_of_its_own(smollm2_path: Path):
    closed = []

    @contextlib.contextmanager
    def serve_model(path: Path) -> Iterator[ServedModel]:
        with served(router_app(path, FakeBackend(token_ids=IDS))) as url:
            yield ServedModel(url, KEY)
        closed.append(path)

    with FlashrayClient("local", local_model_path=smollm2_path, serve_model=serve_model) as client:
        assert conversation(client, MODEL)[0] != ""
    client.close()
    assert closed == [smollm2_path]


def test_a_client_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path):
    closed = []

    @contextlib.contextmanager
    def serve_model(path: Path) -> Iterator[ServedModel]:
        try:
            yield ServedModel("http://127.0.0.1:1", KEY)
        finally:
            closed.append(path)

    with pytest.raises(FileNotFoundError):
        FlashrayClient(
            "local",
            local_model_path=tmp_path,
            serve_model=serve_model,
            ca_file=tmp_path / "missing.pem",
        )
    assert closed == [tmp_path]


@pytest.mark.parametrize(
    ("mode", "arguments", "fault"),
    [
        ("cloud", {}, "expected one of direct, proxy, local"),
        ("proxy", {"api_key": "k"}, "proxy mode needs the address"),
        ("direct", {}, "pass one, or set ANTHROPIC_API_KEY"),
        ("local", {}, "pass one, or set FLASHRAY_API_KEY"),
        ("direct", {"local_model_path": Path("/m")}, "only for local mode"),
        ("local", {"local_model_path": Path("/m")}, "go together"),
    ],
)
def test_arguments_that_do_not_belong_together(mode, arguments, fault):
    with pytest.raises(ValueError, match=fault):
        FlashrayClient(mode, **arguments)


@pytest.mark.parametrize("mode", ["proxy", "local"])
def test_a_key_for_claude_goes_to_claude_only(monkeypatch, mode):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-secret")
    with pytest.raises(ValueError, match="FLASHRAY_API_KEY"):
        FlashrayClient(mode, base_url="http://127.0.0.1:1")
