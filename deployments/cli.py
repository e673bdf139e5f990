"""The command line: serve, chat, doctor."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ClusterError
from deployments.errors import DeploymentError

DEFAULT_URL = "http://127.0.0.1:8000"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (DeploymentError, ClusterError) as exc:
        print(f"flashray: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashray", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model on this machine until Ctrl-C")
    serve.add_argument("--config", type=Path, help="YAML file; options below win over it")
    serve.add_argument("--model", help="a .gguf file, a Hugging Face folder or the built-in name")
    serve.add_argument("--host", help="default 127.0.0.1")
    serve.add_argument("--port", type=int, default=_port_from_environment(), help="default 8000")
    serve.add_argument("--no-dashboard", action="store_true", help="leave Ray's dashboard out")
    serve.set_defaults(run=_serve)

    chat = commands.add_parser("chat", help="talk to a running Flashray")
    chat.add_argument("--url", default=DEFAULT_URL)
    chat.add_argument("--key", default=os.environ.get("FLASHRAY_DEMO_KEY"))
    chat.add_argument("--model", help="default: the first model served")
    chat.add_argument("--max-tokens", type=int, default=512)
    chat.set_defaults(run=_chat)

    doctor = commands.add_parser("doctor", help="check this machine: what is wrong, what to do")
    doctor.add_argument("--config", type=Path)
    doctor.add_argument("--port", type=int, default=_port_from_environment())
    doctor.set_defaults(run=_doctor)
    return parser


def _serve(options: argparse.Namespace) -> int:
    from deployments.serve_command import serve

    serve(options.config, options.model, options.host, options.port, not options.no_dashboard)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from deployments.chat_command import chat

    return chat(options.url, options.key, options.model, options.max_tokens)


def _doctor(options: argparse.Namespace) -> int:
    from deployments.doctor import run_doctor

    return run_doctor(options.config, options.port)


def _port_from_environment() -> int | None:
    value = os.environ.get("PORT", "")
    if value and not value.isdigit():
        raise SystemExit(f"flashray: PORT must be a number, got {value!r}")
    return int(value) if value else None


if __name__ == "__main__":
    sys.exit(main())
