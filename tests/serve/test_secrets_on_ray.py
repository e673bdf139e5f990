"""Canaries in keys, headers and prompts: none of them may turn up in any log, metric, audit line
or error body of the whole app."""

import re
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import KEY

pytestmark = pytest.mark.ray

CANARIES = {
    "wrong key": "sk-canary-4711-wrong-key",
    "cookie": "canary-4711-cookie",
    "header": "canary-4711-team-header",
    "prompt": "canary-4711-prompt",
    "system": "canary-4711-system",
    "stop": "canary-4711-stop-string",
    "metadata": "canary-4711-user",
    "field": "canary-4711-unknown-field-value",
}


def ask(url: str, **changes) -> list[httpx.Response]:
    """The same words through both dialects, streamed and whole, with the right and a wrong key."""
    body = {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": CANARIES["prompt"]}],
        **changes,
    }
    claude = {**body, "system": CANARIES["system"], "stop_sequences": [CANARIES["stop"]]}
    openai = {**body, "user": CANARIES["metadata"], "stop": [CANARIES["stop"]]}
    answers = []
    for key in (KEY, CANARIES["wrong key"]):
        headers = {
            "authorization": f"Bearer {key}",
            "anthropic-version": "2023-06-01",
            "cookie": f"session={CANARIES['cookie']}",
            "x-anthropic-team-id": CANARIES["header"],
        }
        for stream in (False, True):
            for path, content in (("messages", claude), ("chat/completions", openai)):
                answers.append(
                    httpx.post(
                        f"{url}/v1/{path}",
                        json={**content, "stream": stream},
                        headers=headers,
                        timeout=30,
                    )
                )
    return answers


def session_logs() -> list[Path]:
    import ray

    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    return [file for file in folder.rglob("*") if file.is_file()]


def test_canaries_stay_in_the_request(app, audit_folder: Path):
    answers = ask(app.url)
    answers += ask(app.url, max_tokens=-1)
    answers += ask(app.url, surprise=CANARIES["field"])
    answers += ask(app.url, max_tokens=10**6)
    assert {answer.status_code for answer in answers} >= {200, 400, 401}
    secrets = [*CANARIES.values(), KEY]
    for answer in answers:
        if answer.status_code != 200:
            assert not [canary for canary in secrets if canary in answer.text], answer.text
    sinks = {str(file): file for file in (*session_logs(), *audit_folder.iterdir())}
    assert any("Router" in name for name in sinks)
    texts = {name: file.read_text(errors="replace") for name, file in sinks.items()}
    texts["metrics"] = httpx.get(f"{app.url}/metrics").text
    hits = [
        (what, name)
        for name, text in texts.items()
        for what, canary in [*CANARIES.items(), ("key", KEY)]
        if re.search(re.escape(canary), text)
    ]
    assert hits == []
    assert sum(text.count("req_") for name, text in texts.items() if "audit-" in name) > 10
