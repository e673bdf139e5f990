"""An environment of its own for the SDKs' suites: their sources as published, and what they need.

Built once for each set of versions, outside the tree. The marker is written last: a folder without
one is not complete and is built anew.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
COMPLETE = "complete"


class EnvironmentFailed(Exception):
    """The environment cannot be built; says which command failed and what it wrote."""


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path
    versions: Mapping[str, str]

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def source(self, sdk: str) -> Path:
        return self.folder / f"{sdk}-{self.versions[sdk]}"


def prepare(cache: Path, versions: Mapping[str, str]) -> Environment:
    """Raises EnvironmentFailed."""
    described = f"{sys.version} {sorted(versions.items())} {REQUIREMENTS.read_text()}"
    name = hashlib.sha256(described.encode()).hexdigest()[:16]
    environment = Environment(cache / "conformance" / name, versions)
    if not (environment.folder / COMPLETE).exists():
        _build(environment)
    return environment


def _build(environment: Environment) -> None:
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.mkdir(parents=True)
    pins = [f"{sdk}=={version}" for sdk, version in environment.versions.items()]
    extras = [pin.replace("==", "[aiohttp]==") for pin in pins]
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([sys.executable, "-m", "venv", str(environment.folder / "venv")])
    _run([*pip, "install", "--requirement", str(REQUIREMENTS), *extras])
    # Metadata of a source distribution comes from its build backend: one of the requirements.
    archives = ["--dest", str(environment.folder), "--no-deps", "--no-binary", ":all:"]
    _run([*pip, "download", "--no-build-isolation", *archives, *pins])
    for sdk in environment.versions:
        archive = environment.source(sdk).with_name(f"{environment.source(sdk).name}.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(environment.folder, filter="data")
    (environment.folder / COMPLETE).touch()


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise EnvironmentFailed(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
