"""Config in, Serve application out. Pure: nothing starts here."""

from ray import serve

from deployments.config import AppConfig
from deployments.flash_engine import engine_deployment
from deployments.model_files import ModelFiles
from deployments.router_ingress import router_deployment

APP_NAME = "flashray"  # as Serve knows it: deployed anew, it takes the old one's place


def build_app(config: AppConfig, model: ModelFiles) -> serve.Application:
    engine = engine_deployment(str(model.path), config.engine)
    return router_deployment(config, str(model.path), engine)
