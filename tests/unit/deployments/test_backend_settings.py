"""Backends of a configuration: where their keys are, never the keys."""

from pathlib import Path

import pytest
import yaml

from deployments.backend_settings import upstreams_of
from deployments.config import AppConfig, load_config
from deployments.errors import ConfigError
from router.backends.direct import DirectUpstream
from router.backends.proxy import ProxyUpstream

CANARY = "sk-ant-canary-9f31"
GOOD = """
backends:
  - {name: claude, kind: direct, api_key_env: ANTHROPIC_API_KEY}
  - {name: gateway, kind: proxy, url: "https://llm.corp.example/anthropic/", api_key_file: /run/key}
  - {name: ollama, kind: proxy, url: "http://10.0.0.5:11434", protocol: openai,
     leaves_company: true}
routes:
  - model: sonnet
    targets:
      - {backend: gateway, model: claude-sonnet}
      - {backend: local, model: smollm2-135m-instruct}
"""


def config_of(text: str, folder: Path) -> AppConfig:
    file = folder / "app.yaml"
    file.write_text(text)
    return load_config(file)


async def test_backends_become_upstreams(tmp_path: Path):
    claude, gateway, ollama = upstreams_of(config_of(GOOD, tmp_path).backends)
    assert isinstance(claude, DirectUpstream)
    assert isinstance(gateway, ProxyUpstream)
    assert claude.settings.url == "https://api.anthropic.com"
    assert gateway.settings.url == "https://llm.corp.example/anthropic"
    assert gateway.settings.api_key_file == Path("/run/key")
    assert ollama.settings.protocol == "openai"
    leaves = [each.settings.leaves_company for each in (claude, gateway, ollama)]
    assert leaves == [True, False, True]
    for upstream in (claude, gateway, ollama):
        await upstream.close()


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        (f"kind: direct, api_key: {CANARY}", "keys never stand in a configuration"),
        (f"kind: direct, auth_token: {CANARY}", "keys never stand in a configuration"),
        (f"kind: direct, api_key_env: {CANARY}", "expected the name of an environment variable"),
        (f'kind: proxy, url: "https://u:{CANARY}@h"', "expected no user, password or query"),
        (f'kind: proxy, url: "https://h?k={CANARY}"', "expected no user, password or query"),
        ("kind: direct, api_key_env: A, api_key_file: /b", "name one of them"),
        ('kind: direct, url: "http://api.example"', "by https only"),
        ("kind: direct, protocol: openai", "a direct backend speaks anthropic"),
        ("kind: proxy", "a proxy needs one"),
        ('kind: proxy, url: "ftp://h"', "expected https://HOST"),
        ("kind: bedrock", "'direct' or 'proxy'"),
        ("kind: direct, timeout: 3", "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_backend_is_named_and_no_key_is_quoted(tmp_path: Path, backend: str, fault: str):
    with pytest.raises(ConfigError) as caught:
        config_of(f"backends: [{{name: claude, {backend}}}]", tmp_path)
    assert fault in str(caught.value)
    assert "backends.0" in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("backends: [{name: local, kind: direct}]", "the name `local` is that of the engine"),
        ("backends: [{name: a, kind: direct}, {name: a, kind: direct}]", "a name of its own"),
        (GOOD.replace("{backend: gateway", "{backend: gatewy"), "expected one of claude, gateway"),
    ],
)
def test_names_lead_somewhere(tmp_path: Path, text: str, fault: str):
    with pytest.raises(ConfigError, match=fault):
        config_of(text, tmp_path)


def test_a_loopback_server_may_stand_for_claude(tmp_path: Path):
    text = 'backends: [{name: claude, kind: direct, url: "http://127.0.0.1:9"}]'
    assert config_of(text, tmp_path).backends[0].url == "http://127.0.0.1:9"


def test_routes_survive_a_round_trip_through_yaml(tmp_path: Path):
    assert list(config_of(GOOD, tmp_path).routes) == yaml.safe_load(GOOD)["routes"]


def test_the_documents_example_is_a_configuration(tmp_path: Path):
    document = Path(__file__).parents[3] / "docs" / "backends.md"
    example = document.read_text().split("```yaml")[1].split("```")[0]
    config = config_of(example, tmp_path)
    assert [backend.name for backend in config.backends] == ["claude", "gateway", "ollama"]
    assert len(config.routes) == 1
