"""`ray job submit --working-dir . -- python -m deployments.jobs.drain`: ends the app and the
detached stores beside it, and leaves the cluster as it was found."""

import argparse
import sys
from collections.abc import Sequence

from deployments.app import APP_NAME
from deployments.cold_store import end_cold_stores
from deployments.errors import DeploymentError
from deployments.jobs.serve import connect, say
from deployments.limit_store import end_limit_store


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.jobs.drain", description=__doc__)
    parser.parse_args(arguments)
    try:
        connect()
    except DeploymentError as exc:
        print(f"flashray: {exc}", file=sys.stderr)
        return 1
    run()
    return 0


def run() -> None:
    """Idempotent: what is not there is not missed. Streams get the deployments' graceful time."""
    from ray import serve

    say("ending the app; its replicas finish what they can")
    serve.delete(APP_NAME)
    say("ending the stores of limits and of KV blocks")
    end_limit_store()
    end_cold_stores()
    say("drained")


if __name__ == "__main__":
    sys.exit(main())
