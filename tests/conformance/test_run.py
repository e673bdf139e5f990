"""The runner cannot be fooled: what did not run, or was skipped, has not passed."""

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.conformance import environment, run
from tests.conformance.suites import KEYS, SUITES, VERSIONS

CASES = """<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure message="x"/></testcase>
<testcase name="c"><skipped/></testcase>
<testcase name="d"><error/></testcase>
<testcase name="e"><system-out>x</system-out></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def nowhere(tmp_path: Path) -> environment.Environment:
    return environment.Environment(tmp_path, VERSIONS)


def fake_pytest(monkeypatch, report: str | None) -> None:
    def ran(command, **_options):
        if report is not None:
            option = next(word for word in command if word.startswith("--junitxml="))
            Path(option.removeprefix("--junitxml=")).write_text(report)
        return subprocess.CompletedProcess(command, 0, "words of pytest", "")

    monkeypatch.setattr(subprocess, "run", ran)


def passing(num_tests: int) -> str:
    return f"<testsuite>{'<testcase/>' * num_tests}</testsuite>"


@pytest.mark.parametrize("report", [None, CASES, passing(0), passing(64), passing(66)])
def test_anything_but_all_of_a_suite_counts_for_nothing(monkeypatch, capsys, nowhere, report):
    fake_pytest(monkeypatch, report)
    assert run.run_suite(nowhere, SUITES[0], "http://router") == 0
    assert "expected 65" in capsys.readouterr().out


def test_all_of_a_suite_counts(monkeypatch, nowhere):
    fake_pytest(monkeypatch, passing(65))
    assert run.run_suite(nowhere, SUITES[0], "http://router") == 65


def test_skipped_and_broken_tests_have_not_passed(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(CASES)
    assert run._counts(report) == (5, 2)


def test_other_versions_of_the_sdks_must_be_counted_anew(monkeypatch, capsys):
    monkeypatch.setattr(run, "VERSIONS", {**VERSIONS, "openai": "9.9"})
    assert run.main() == 1
    assert "9.9" in capsys.readouterr().out


def test_an_environment_that_cannot_be_built_says_why(monkeypatch, tmp_path: Path):
    def fails(command, **_options):
        return subprocess.CompletedProcess(command, 1, "", "no space left")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(environment.EnvironmentFailed, match="no space left"):
        environment.prepare(tmp_path, VERSIONS)
    assert not list(tmp_path.rglob(environment.COMPLETE))


@pytest.mark.parametrize(
    ("path", "model"),
    [("/v1/messages", "claude-opus-5-5"), ("/v1/chat/completions", "gpt-6-astra")],
)
async def test_through_the_proxy_means_nowhere_else(monkeypatch, smollm2_path: Path, path, model):
    monkeypatch.setenv(run.KEY_VARIABLE, "")
    app = run.proxying_app(smollm2_path, "http://127.0.0.1:9")  # nobody listens there
    headers = {"x-api-key": KEYS[0], "anthropic-version": "2023-06-01"}
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 503
    assert answer.headers["x-flashray-backend"] in ("anthropic", "openai")
