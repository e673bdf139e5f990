import hashlib
from pathlib import Path

import pytest
from pydantic import ValidationError
from ray import serve

from deployments import serve_entry
from deployments.config import AppConfig, HttpSettings, load_config
from deployments.errors import ConfigError
from deployments.jobs import serve as serve_job
from deployments.key_file import KEYS_FILE, read_key_file, with_mounted_keys
from deployments.model_files import prepare_model
from router.identity import hash_key
from tests.unit.deployments.test_model_files import tiny_checkpoint

ALICE, BOB = (hashlib.sha256(name.encode()).hexdigest() for name in ("alice-key", "bob-key"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(KEYS_FILE, raising=False)
    monkeypatch.delenv("FLASHRAY_DEMO_KEY", raising=False)
    monkeypatch.setenv("FLASHRAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"# teams\n\nsearch:{ALICE}\nads.eu-1:{BOB}\n")
    monkeypatch.setenv(KEYS_FILE, str(file))
    return file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "tiny")


def test_key_file_maps_hashes_to_teams(key_file: Path) -> None:
    assert read_key_file(key_file) == {ALICE: "search", BOB: "ads.eu-1"}


def test_mounted_keys_join_the_configured_ones(key_file: Path) -> None:
    own = hash_key("own")
    config = with_mounted_keys(AppConfig(key_hashes={own: "platform", ALICE: "search"}))
    assert config.key_hashes == {own: "platform", ALICE: "search", BOB: "ads.eu-1"}


def test_without_a_file_the_configuration_stays() -> None:
    config = AppConfig(key_hashes={ALICE: "search"})
    assert with_mounted_keys(config) is config


@pytest.mark.parametrize(
    "line", ["search:sk-live-secret", f"search {ALICE}", ALICE, f"search:{ALICE.upper()}"]
)
def test_bad_line_is_named_by_number_and_never_shown(key_file: Path, line: str) -> None:
    key_file.write_text(f"ads:{BOB}\n{line}\n")
    with pytest.raises(ConfigError, match="line 2: expected `team:sha256`") as caught:
        read_key_file(key_file)
    assert line not in str(caught.value)


def test_key_of_two_teams_is_refused(key_file: Path) -> None:
    key_file.write_text(f"ads:{BOB}\nsearch:{BOB}\n")
    with pytest.raises(ConfigError, match=r"line 2: one key.*ads and search"):
        read_key_file(key_file)
    key_file.write_text(f"ads:{BOB}\n")
    with pytest.raises(ConfigError, match="for two teams: search and ads"):
        with_mounted_keys(AppConfig(key_hashes={BOB: "search"}))


def test_missing_key_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEYS_FILE, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=f"absent: {KEYS_FILE} names it"):
        with_mounted_keys(AppConfig())


def test_key_in_place_of_its_hash_is_refused_and_not_shown() -> None:
    with pytest.raises(ValidationError, match=r"entry 2: expected the SHA-256") as caught:
        AppConfig.model_validate({"key_hashes": {ALICE: "a", "sk-live-secret": "b"}})
    assert "sk-live-secret" not in str(caught.value)


def test_serve_builds_the_app_from_args(key_file: Path, checkpoint: Path) -> None:
    """As Serve calls it: the args become the annotated AppConfig."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call

    app = call(serve_entry.app, {"model": str(checkpoint), "engine": {"max_model_len": 64}})
    assert isinstance(app, serve.Application)
    config, model_path, _engine, door = app._bound_deployment.init_args
    assert door is None  # Serve's proxies bring the requests
    assert config.key_hashes == {ALICE: "search", BOB: "ads.eu-1"}
    assert config.engine.max_model_len == 64
    assert Path(model_path) == prepare_model(str(checkpoint)).path


def test_entry_refuses_an_address_that_would_be_ignored(key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"http: .*http_options"):
        serve_entry.app(AppConfig(http=HttpSettings(port=8001)))


def test_entry_refuses_an_app_that_nobody_could_use(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=f"no API key: name a key file in .{KEYS_FILE}"):
        serve_entry.app(AppConfig(model=str(checkpoint)))


def test_job_makes_a_key_on_loopback_only(capsys: pytest.CaptureFixture[str]) -> None:
    config = serve_job.with_some_key(AppConfig())
    printed = capsys.readouterr().out.split()[-1]
    assert config.key_hashes == {hash_key(printed): "demo"}
    with pytest.raises(ConfigError, match=r"no API key for an app on 0\.0\.0\.0"):
        serve_job.with_some_key(AppConfig(http=HttpSettings(host="0.0.0.0")))


def test_job_takes_the_given_key_and_keeps_it_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHRAY_DEMO_KEY", "chosen-by-me")
    assert serve_job.with_some_key(AppConfig()).key_hashes == {hash_key("chosen-by-me"): "demo"}
    assert capsys.readouterr().out == ""


def test_job_keeps_configured_keys_alone(key_file: Path) -> None:
    assert serve_job.with_some_key(AppConfig()).key_hashes == {ALICE: "search", BOB: "ads.eu-1"}


def test_job_ends_with_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "app.yaml"
    config.write_text("engine: {max_model_length: 64}\n")
    assert serve_job.main(["--config", str(config)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"flashray: {config}: engine.max_model_length: ")
    assert message.count("\n") == 1


def test_job_names_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve_job.main(["--port", "1"])
    config = AppConfig(model="/absent/model", key_hashes={ALICE: "search"})
    with pytest.raises(Exception, match="/absent/model does not exist"):
        serve_job.run(config)
    assert "model: /absent/model" in capsys.readouterr().out


def test_shipped_example_is_valid_and_stays_on_loopback() -> None:
    example = load_config(Path(__file__).parents[3] / "examples" / "cpu.yaml")
    assert example.http.host == "127.0.0.1"
    assert example.key_hashes == {}
