"""The builder that a Serve configuration names: `import_path: deployments.serve_entry:app`, with
`args` of the fields of AppConfig. Nothing but its environment and its node's disk is there for it.
"""

from ray import serve

from deployments.app import build_app
from deployments.config import AppConfig, team_names_by_key_hash
from deployments.errors import ConfigError
from deployments.key_file import KEYS_FILE, with_mounted_keys
from deployments.model_files import prepare_model


def app(config: AppConfig) -> serve.Application:
    """Builds the app once the model files are on this node. Raises ConfigError, ModelFilesError.

    It runs on any node, and so do the replicas: model and cache lie at one path on all of them.
    """
    if "http" in config.model_fields_set:
        raise ConfigError("http: this app listens where http_options of Serve's own config say")
    config = with_mounted_keys(config)
    if not team_names_by_key_hash(config):
        raise ConfigError(
            f"no API key: name a key file in ${KEYS_FILE}, or set key_hashes or teams"
        )
    model = prepare_model(config.model, with_weights=config.engine.has_weights)
    return build_app(config, model)
