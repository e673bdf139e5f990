"""A private Ray and Serve that run what standard input declares, one Serve configuration a line, as
`serve deploy` would. Run as a process of its own: a process has one Ray."""

import sys

from cluster.bringup import LocalRay, RayOptions


def main(port: int) -> None:
    with LocalRay(RayOptions(num_cpus=6, include_dashboard=False)):
        from ray import serve
        from ray.serve.config import HTTPOptions
        from ray.serve.context import _get_global_client
        from ray.serve.schema import LoggingConfig, ServeDeploySchema

        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        options = HTTPOptions(host="127.0.0.1", port=port)
        serve.start(http_options=options, logging_config=quiet)
        for line in sys.stdin:
            config = ServeDeploySchema.model_validate_json(line)
            _get_global_client().deploy_apps(config, _blocking=False)
            sys.stdout.write("deployed\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
