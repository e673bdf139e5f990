"""`flashray doctor`: what is on this machine, what is wrong with it, and what to do."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cluster.bringup import require_free_port
from cluster.errors import ClusterError
from cluster.inventory import GpuInventory, read_inventory
from deployments.config import AppConfig, load_config
from deployments.errors import DeploymentError
from deployments.model_files import default_cache_dir, locate_source, open_model, verify_model

FREE_DISK_GIB = 5.0
FREE_SHM_GIB = 0.5
TESTED_RAY = "2.60.0"
MIN_TORCH, BELOW_TORCH = (2, 11), (2, 14)


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice` says what to do; empty when there is nothing to do."""

    subject: str
    verdict: Verdict
    fact: str
    advice: str = ""


def run_doctor(config_file: Path | None, port: int | None) -> int:
    """Print every finding; 1 when one of them keeps Flashray from serving. Raises ConfigError."""
    config = load_config(config_file) if config_file else AppConfig()
    findings = list(examine(config, config.http.port if port is None else port))
    for finding in findings:
        print(f"{finding.verdict:<6} {finding.subject:<10} {finding.fact}")
        if finding.advice:
            print(f"{'':<18}-> {finding.advice}")
    wrong = [finding for finding in findings if finding.verdict is Verdict.WRONG]
    print(f"\n{len(wrong)} problems" if wrong else "\nready to serve: flashray serve")
    return 1 if wrong else 0


def examine(config: AppConfig, port: int) -> Iterator[Finding]:
    yield check_python(sys.version_info[:2])
    yield check_torch()
    yield check_ray()
    yield from check_gpus(read_inventory(), config.engine.device)
    yield check_port(config.http.host, port)
    yield from check_disk(default_cache_dir(), shutil.disk_usage)
    yield check_model(config.model)
    if "RAY_ADDRESS" in os.environ:
        yield Finding(
            "Ray",
            Verdict.NOTE,
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']} is set",
            "`flashray serve` ignores it and starts its own Ray; use a job to deploy there",
        )


def check_python(version: tuple[int, int]) -> Finding:
    fact = f"{version[0]}.{version[1]} on {platform.system()} {platform.machine()}"
    if (3, 11) <= version < (3, 13):
        return Finding("Python", Verdict.OK, fact)
    return Finding("Python", Verdict.WRONG, fact, "use 3.11 or 3.12: make PYTHON=python3.12")


def check_torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", Verdict.WRONG, "not installed", "run `make serve`, it installs it")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not MIN_TORCH <= numbers < BELOW_TORCH:
        return Finding("torch", Verdict.WRONG, version, "install torch>=2.11,<2.14")
    import torch

    runtime = f"CUDA runtime {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", Verdict.OK, f"{version}, {runtime}")


def check_ray() -> Finding:
    version = _version("ray")
    if version == TESTED_RAY:
        return Finding("Ray", Verdict.OK, version)
    return Finding(
        "Ray", Verdict.WRONG, version or "not installed", f"pip install 'ray[serve]=={TESTED_RAY}'"
    )


def check_gpus(inventory: GpuInventory, device: str) -> Iterator[Finding]:
    wants_gpu = device.startswith("cuda")
    if inventory.driver_version is None or not inventory.devices:
        yield Finding(
            "GPU",
            Verdict.WRONG if wants_gpu else Verdict.NOTE,
            "no NVIDIA driver" if inventory.driver_version is None else "driver but no GPU",
            "install the driver, or set engine.device to cpu" if wants_gpu else "",
        )
        return
    yield Finding(
        "GPU driver",
        Verdict.OK,
        f"{inventory.driver_version}, CUDA up to {inventory.cuda_version}",
    )
    for gpu in inventory.devices:
        width, widest = gpu.pcie_width
        fact = (
            f"{gpu.name}, {gpu.free_memory_bytes >> 20} of {gpu.memory_bytes >> 20} MiB free, "
            f"PCIe x{width} of x{widest}"
        )
        verdict = Verdict.OK if width == widest else Verdict.NOTE
        advice = "" if width == widest else "fewer lanes than the card has: check slot and riser"
        yield Finding(f"GPU {gpu.index}", verdict, fact, advice)


def check_port(host: str, port: int) -> Finding:
    try:
        require_free_port(host, port)
    except ClusterError as exc:
        return Finding("port", Verdict.WRONG, f"{host}:{port} is in use", str(exc).split(": ")[1])
    return Finding("port", Verdict.OK, f"{host}:{port} is free")


def check_disk(cache: Path, usage: Callable[[Path], tuple[int, int, int]]) -> Iterator[Finding]:
    places = [("disk", cache, FREE_DISK_GIB, "set FLASHRAY_CACHE to a larger disk")]
    if Path("/dev/shm").exists():
        advice = "give the container a larger /dev/shm: Ray's object store lives there"
        places.append(("shm", Path("/dev/shm"), FREE_SHM_GIB, advice))
    for subject, place, needed_gib, advice in places:
        existing = next(path for path in (place, *place.parents) if path.exists())
        free_gib = usage(existing)[2] / (1 << 30)
        enough = free_gib >= needed_gib
        yield Finding(
            subject,
            Verdict.OK if enough else Verdict.WRONG,
            f"{free_gib:.1f} GiB free at {place}",
            "" if enough else f"at least {needed_gib} GiB are needed; {advice}",
        )


def check_model(source: str) -> Finding:
    from deployments.model_files import cached_folder

    try:
        path = locate_source(source)
        folder = cached_folder(path)
        if folder is None:
            return Finding("model", Verdict.OK, f"{path}, not converted yet (done at first start)")
        files = open_model(folder)
        verify_model(files)
    except DeploymentError as exc:
        return Finding("model", Verdict.WRONG, source, str(exc))
    manifest = files.manifest
    fact = f"{manifest.name}: {manifest.architecture}, {manifest.dtype}, SHA-256 verified"
    return Finding("model", Verdict.OK, fact)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
