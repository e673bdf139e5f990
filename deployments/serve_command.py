"""`flashray serve`: the app in the foreground until Ctrl-C."""

import json
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from deployments.config import AppConfig, HttpSettings, load_config
from deployments.keys import DemoKey, demo_key, with_key
from deployments.local_cluster import RunningApp, local_app

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CURL = (
    "curl {url}/v1/messages -H 'authorization: Bearer {key}' "
    "-H 'anthropic-version: 2023-06-01' -H 'content-type: application/json' -d '{body}'"
)


def serve(
    config_file: Path | None, model: str | None, host: str | None, port: int | None, dashboard: bool
) -> None:
    """Returns after Ctrl-C (or TERM, HUP). Raises DeploymentError and ClusterError."""
    config = _config(config_file, model, host, port)
    key = demo_key(config.http.host)
    _stop_on_signals()  # also when started with them ignored
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    try:
        with local_app(with_key(config, key), progress, include_dashboard=dashboard) as app:
            _stop_on_signals()  # Ray has taken TERM meanwhile, to abort
            progress("ready")
            _print_banner(app, key)
            threading.Event().wait()
    except KeyboardInterrupt:
        progress("stopped")


def _config(
    config_file: Path | None, model: str | None, host: str | None, port: int | None
) -> AppConfig:
    config = load_config(config_file) if config_file else AppConfig()
    http = HttpSettings(
        host=host or config.http.host, port=config.http.port if port is None else port
    )
    return config.model_copy(update={"http": http, "model": model or config.model})


def _print_banner(app: RunningApp, key: DemoKey) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": app.model, "max_tokens": 64, "messages": [question]})
    print(f"\nFlashray serves {app.model}")
    print(f"  URL        {app.url}  (Claude Messages API and OpenAI API)")
    print(f"  key        {key.key}" + ("" if key.was_given else "  (random, for this run)"))
    if app.dashboard_url:
        print(f"  dashboard  {app.dashboard_url}  (token in {app.ray_token_file})")
    print(f"  try        {CURL.format(url=app.url, key=key.key, body=body)}")
    print("  chat       flashray chat --url", app.url, "--key", key.key)
    print("  stop       Ctrl-C\n", flush=True)


def _stop_on_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """The first one stops; an impatient second one must not leave processes behind."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    print("\nstopping", file=sys.stderr, flush=True)
    raise KeyboardInterrupt
