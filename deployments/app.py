"""Config in, Serve application out. Pure: nothing starts here."""

from pathlib import Path

from ray import serve

from deployments.config import AppConfig
from deployments.flash_engine import engine_deployment
from deployments.model_files import ModelFiles
from deployments.router_ingress import router_deployment

APP_NAME = "flashray"  # as Serve knows it: deployed anew, it takes the old one's place


def build_app(config: AppConfig, model: ModelFiles, door: Path | None = None) -> serve.Application:
    """`door` of a SharedPort from which the router replicas, all on its machine, take connections;
    without one, Serve's proxies bring the requests."""
    engine = engine_deployment(str(model.path), config.engine)
    return router_deployment(config, str(model.path), engine, door)
