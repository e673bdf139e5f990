"""Runs the official SDKs' own tests against the real router over a scripted backend.

`make conformance`, or `python -m tests.conformance.run`. With `--through-proxy`, the names that the
suites create with are routed to that router as an upstream, by another one. Exits with 1 when a
test does not pass, is skipped, or is not there.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from anthropic.resources.messages import DEPRECATED_MODELS
from starlette.types import ASGIApp

from deployments.model_files import BUILT_IN_MODEL, default_cache_dir, prepare_model
from router.app import create_app
from router.backends.pool import BackendPool
from router.backends.proxy import ProxyUpstream
from router.backends.upstream import UpstreamSettings, Wire
from router.capabilities import Capability
from router.catalog import Catalog
from router.config import RouterConfig
from router.identity import KeyRing, hash_key
from router.teams import Team
from tests.conformance.environment import Environment, EnvironmentFailed, prepare
from tests.conformance.suites import KEYS, MODEL_NAMES, PAGE_CURSORS, SUITES, VERSIONS, Suite
from tests.fakes.backend import FakeBackend
from tests.fakes.router import MODEL, catalog, served

ANSWER = "Hello there."
KEY_VARIABLE = "FLASHRAY_CONFORMANCE_KEY"


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--through-proxy", action="store_true")
    options = parser.parse_args(arguments)
    installed = {sdk: importlib.metadata.version(sdk) for sdk in VERSIONS}
    if installed != VERSIONS:
        print(f"the suites are counted for {VERSIONS}, installed are {installed}: see suites.py")
        return 1
    print("sources and environment of the suites ...", flush=True)
    try:
        environment = prepare(default_cache_dir(), VERSIONS)
    except EnvironmentFailed as failure:
        print(failure)
        return 1
    folder = prepare_model(BUILT_IN_MODEL).path
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(served(conforming_app(folder)))
        if options.through_proxy:
            url = stack.enter_context(served(proxying_app(folder, url)))
        passed = [run_suite(environment, suite, url) for suite in SUITES]
    num_tests = sum(suite.num_tests for suite in SUITES)
    print(f"{sum(passed)} of {num_tests} passed")
    return 0 if sum(passed) == num_tests else 1


def proxying_app(model_folder: Path, url: str) -> ASGIApp:
    """A router that creates nothing itself: it passes on, byte for byte, to the one at `url`."""
    os.environ[KEY_VARIABLE] = KEYS[0]
    upstreams = [
        ProxyUpstream(UpstreamSettings(wire, "proxy", url, wire, api_key_env=KEY_VARIABLE))
        for wire in get_args(Wire)
    ]
    names = {"anthropic": ("claude-opus-5-5", *DEPRECATED_MODELS), "openai": ("gpt-6-astra",)}
    routes = [
        {"model": name, "targets": [{"backend": wire, "model": name}]}
        for wire in names
        for name in dict.fromkeys(names[wire])
    ]
    team = Team("suites", backends=frozenset({"local", *names}))
    return conforming_app(model_folder, BackendPool(upstreams, routes), (team,))


def conforming_app(
    model_folder: Path, pool: BackendPool | None = None, teams: Sequence[Team] = ()
) -> ASGIApp:
    """A router whose one model can do everything, under every name and key the suites use."""
    model = dataclasses.replace(
        catalog(model_folder).resolve(MODEL), capabilities=frozenset(Capability)
    )
    names = (*MODEL_NAMES, *PAGE_CURSORS, *DEPRECATED_MODELS)
    return create_app(
        catalog=Catalog([model], dict.fromkeys(names, MODEL)),
        backend=FakeBackend(token_ids=(*model.tokenizer.encode(ANSWER), *model.eos_token_ids)),
        keys=KeyRing({hash_key(key): "suites" for key in KEYS}),
        config=RouterConfig(),
        pool=pool,
        teams=teams,
    )


def run_suite(environment: Environment, suite: Suite, url: str) -> int:
    """The number of tests that passed; 0 when it is not the number that there are."""
    label = f"{suite.sdk} {environment.versions[suite.sdk]} {suite.path}"
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        output = _pytest(environment, suite, f"{url}{suite.base_path}", report)
        num_run, num_passed = _counts(report)
    duration_s = time.monotonic() - started_s
    is_good = num_run == num_passed == suite.num_tests
    verdict = "passed" if is_good else f"passed, {num_run} ran, expected {suite.num_tests}"
    print(f"{label}: {num_passed} {verdict} in {duration_s:.1f} s", flush=True)
    if not is_good:
        print(output)
    return num_passed if is_good else 0


def _pytest(environment: Environment, suite: Suite, base_url: str, report: Path) -> str:
    """Our own settings stay out: the suite's pyproject.toml holds, without its parallel runs."""
    command = [str(environment.python), "-m", "pytest", "-q", "--override-ini=addopts="]
    command += ["--tb=short", "--show-capture=no", f"--junitxml={report}", suite.path]
    command += [option for plugin in suite.plugins for option in ("-p", plugin)]
    command += ["-k", suite.keyword] if suite.keyword else []
    ran = subprocess.run(
        command,
        cwd=environment.source(suite.sdk),
        env={"PATH": os.environ["PATH"], "HOME": str(Path.home()), "TEST_API_BASE_URL": base_url},
        capture_output=True,
        text=True,
    )
    return ran.stdout + ran.stderr


def _counts(report: Path) -> tuple[int, int]:
    """(tests that ran, tests that passed); skipped is not passed."""
    if not report.exists():
        return 0, 0
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = {"failure", "error", "skipped"}
    return len(cases), sum(not bad & {outcome.tag for outcome in case} for case in cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
