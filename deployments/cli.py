"""The command line: serve, chat, doctor, audit, calibrate, trace, hash-key."""

import argparse
import getpass
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ClusterError
from deployments.errors import DeploymentError
from engine.cache.calibration import DEFAULT_MAX_ERROR
from engine.cache.formats import COLD_FORMATS
from engine.cache.tier_config import DEFAULT_COLD_FORMAT

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

    audit = commands.add_parser("audit", help="what was used, by whom")
    audit.add_argument("--folder", type=Path, help="default $FLASHRAY_STATE/audit")
    audit.add_argument("--team", help="this team only")
    audit.add_argument("--since", help="RFC 3339 time or date, UTC, such as 2026-11-30")
    audit.add_argument("--request", help="this request id only")
    audit.add_argument("--json", action="store_true", help="records, one JSON object a line")
    audit.set_defaults(run=_audit)

    _add_calibrate(commands)
    _add_trace(commands)

    hash_key = commands.add_parser("hash-key", help="the SHA-256 of an API key, for a config file")
    hash_key.add_argument("--new", action="store_true", help="make a new key up and print it too")
    hash_key.set_defaults(run=_hash_key)
    return parser


def _add_calibrate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    calibrate = commands.add_parser(
        "calibrate", help="measure on a text which cold format each layer of a model bears"
    )
    calibrate.add_argument("model", help="a .gguf file, a Hugging Face folder or the built-in name")
    calibrate.add_argument("text", type=Path, help="UTF-8, such as the model will be asked about")
    calibrate.add_argument(
        "--out", type=Path, help="default MODEL.calibration.json, in this folder"
    )
    calibrate.add_argument("--plot", type=Path, help="draw the errors into this .svg file")
    calibrate.add_argument(
        "--cold-format",
        choices=tuple(COLD_FORMATS),
        default=DEFAULT_COLD_FORMAT,
        help=f"wanted for all layers, default {DEFAULT_COLD_FORMAT}",
    )
    calibrate.add_argument(
        "--tokens",
        type=int,
        default=4096,
        help="of each window, of which there are up to two: default 4096",
    )
    calibrate.add_argument(
        "--max-error",
        type=float,
        default=DEFAULT_MAX_ERROR,
        help=f"relative, default {DEFAULT_MAX_ERROR}; a layer above it gets more bits",
    )
    calibrate.set_defaults(run=_calibrate)


def _add_trace(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    trace = commands.add_parser(
        "trace", help="answer one prompt and record what each layer looks at: table, data, pictures"
    )
    trace.add_argument("model", help="a .gguf file, a Hugging Face folder or the built-in name")
    trace.add_argument("text", type=Path, help="the prompt: UTF-8, a file or -, standard input")
    trace.add_argument(
        "--attention",
        action="store_true",
        required=True,
        help="what is traced: nothing else is yet",
    )
    trace.add_argument(
        "--tiers",
        choices=(*COLD_FORMATS, "none"),
        default=DEFAULT_COLD_FORMAT,
        help=f"cold format, or none: an exact cache; default {DEFAULT_COLD_FORMAT}",
    )
    trace.add_argument(
        "--skip-epsilon",
        type=float,
        default=0.0,
        help="of a query's softmax, what decodes may leave out of the cold tier; default: nothing",
    )
    trace.add_argument("--max-tokens", type=int, default=16, help="to answer, greedily: default 16")
    trace.add_argument("--layer", type=int, help="drawn by step; default: the farthest-looking one")
    trace.add_argument("--out", type=Path, help="folder, default MODEL.trace, in this folder")
    trace.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda computes in bfloat16"
    )
    trace.set_defaults(run=_trace)


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


def _audit(options: argparse.Namespace) -> int:
    from deployments.audit_command import audit

    return audit(options.folder, options.team, options.since, options.request, options.json)


def _calibrate(options: argparse.Namespace) -> int:
    from deployments.calibrate_command import calibrate

    return calibrate(
        options.model,
        options.text,
        options.out,
        options.plot,
        options.cold_format,
        options.tokens,
        options.max_error,
    )


def _trace(options: argparse.Namespace) -> int:
    from deployments.trace_command import trace

    return trace(
        options.model,
        options.text,
        options.tiers,
        options.skip_epsilon,
        options.max_tokens,
        options.layer,
        options.out,
        options.device,
    )


def _hash_key(options: argparse.Namespace) -> int:
    """The key is read from standard input, so that it stays out of process lists and histories."""
    from router.identity import hash_key

    if options.new:
        key = f"sk-flashray-{secrets.token_urlsafe(24)}"
        print(f"key   {key}")
    else:
        key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
    print(f"hash  {hash_key(key)}")
    return 0


def _port_from_environment() -> int | None:
    value = os.environ.get("PORT", "")
    if value and not value.isdigit():
        raise SystemExit(f"flashray: PORT must be a number, got {value!r}")
    return int(value) if value else None


if __name__ == "__main__":
    sys.exit(main())
