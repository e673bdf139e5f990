"""`ray job submit --working-dir . -- python -m deployments.jobs.serve --config FILE`: deploys the
app on the running cluster and ends; the app stays. Run again, it is deployed anew in its place."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.bringup import require_free_port
from cluster.errors import ClusterError
from deployments.config import AppConfig, HttpSettings, load_config, team_names_by_key_hash
from deployments.errors import BringUpError, ConfigError, DeploymentError
from deployments.key_file import KEYS_FILE, with_mounted_keys
from deployments.keys import demo_key, is_loopback, with_key
from deployments.local_cluster import await_ready, deploy
from deployments.model_files import prepare_model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.jobs.serve", description=__doc__)
    parser.add_argument("--config", type=Path, help="YAML file; without one, the built-in model")
    options = parser.parse_args(arguments)
    try:
        run(load_config(options.config) if options.config else AppConfig())
    except (DeploymentError, ClusterError) as exc:
        print(f"flashray: {exc}", file=sys.stderr)
        return 1
    return 0


def run(config: AppConfig) -> None:
    """Raises DeploymentError and ClusterError; the app is up and ready on return."""
    config = with_some_key(config)
    say(f"model: {config.model}")
    model = prepare_model(config.model, with_weights=config.engine.has_weights, progress=say)
    connect()
    _check_http(config.http)
    say("starting the engine and the router")
    url = f"http://{config.http.host}:{deploy(config, model)}"
    await_ready(_reachable(config.http))
    say(f"Flashray serves {config.served_name or model.manifest.name} at {url}")


def with_some_key(config: AppConfig) -> AppConfig:
    """Configured and mounted keys; on loopback, when there are none, a demo key that is printed.

    Raises ConfigError when others could reach the app and nobody could use it.
    """
    config = with_mounted_keys(config)
    if team_names_by_key_hash(config):
        return config
    if not is_loopback(config.http.host):
        raise ConfigError(
            f"no API key for an app on {config.http.host}: name a key file in ${KEYS_FILE}, "
            "set key_hashes or teams, or serve on 127.0.0.1"
        )
    key = demo_key(config.http.host)
    if not key.was_given:
        say(f"no API key is configured; a random one, until the next deployment: {key.key}")
    return with_key(config, key)


def connect() -> None:
    """To the Ray cluster that this job runs on. Raises BringUpError."""
    import ray

    try:
        ray.init("auto", namespace="flashray", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, OSError, ValueError) as exc:
        raise BringUpError(
            f"no Ray cluster here: submit this with `ray job submit`, or start a head: {exc}"
        ) from exc


def _check_http(http: HttpSettings) -> None:
    """A running Serve keeps the address it was started with. Raises BringUpError, PortInUse."""
    from ray.serve.context import _get_global_client  # Serve has no public way to ask

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        require_free_port(http.host, http.port)
        return
    running = client.http_config
    if (running.host, running.port) != (http.host, http.port):
        raise BringUpError(
            f"this cluster's Serve listens on {running.host}:{running.port} already and cannot "
            f"move to {http.host}:{http.port}: set http.host and http.port to the former"
        )


def _reachable(http: HttpSettings) -> str:
    """The URL for a client on this node, also when the app listens on every interface."""
    host = "127.0.0.1" if http.host == "0.0.0.0" else http.host
    return f"http://{host}:{http.port}"


def say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
