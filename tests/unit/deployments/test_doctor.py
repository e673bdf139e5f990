import socket
from pathlib import Path

import pytest

from cluster.inventory import GpuDevice, GpuInventory
from deployments.config import AppConfig
from deployments.doctor import (
    Verdict,
    check_disk,
    check_gpus,
    check_model,
    check_port,
    check_python,
    check_ray,
    check_torch,
    examine,
    run_doctor,
)

NO_DRIVER = GpuInventory(None, None, ())


def gpu(width: int) -> GpuInventory:
    device = GpuDevice(0, "GPU-1", "NVIDIA H200", 141 << 30, 100 << 30, (width, 16))
    return GpuInventory("580.1", "13.0", (device,))


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ((3, 10), Verdict.WRONG),
        ((3, 11), Verdict.OK),
        ((3, 12), Verdict.OK),
        ((3, 13), Verdict.WRONG),
    ],
)
def test_python(version: tuple[int, int], verdict: Verdict):
    finding = check_python(version)
    assert finding.verdict is verdict
    assert bool(finding.advice) == (verdict is Verdict.WRONG)


def test_what_is_installed_here_is_fine():
    assert check_torch().verdict is Verdict.OK
    assert check_ray().verdict is Verdict.OK


def test_no_driver_matters_only_when_a_gpu_is_wanted():
    (on_cpu,) = check_gpus(NO_DRIVER, "cpu")
    (on_gpu,) = check_gpus(NO_DRIVER, "cuda")
    assert on_cpu.verdict is Verdict.NOTE
    assert on_gpu.verdict is Verdict.WRONG
    assert "engine.device" in on_gpu.advice


def test_a_half_seated_card_is_noted():
    driver, card = check_gpus(gpu(8), "cuda")
    assert "580.1" in driver.fact
    assert card.verdict is Verdict.NOTE
    assert "PCIe x8 of x16" in card.fact
    assert list(check_gpus(gpu(16), "cuda"))[1].verdict is Verdict.OK


def test_a_port_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = check_port("127.0.0.1", server.getsockname()[1])
    assert finding.verdict is Verdict.WRONG
    assert "PORT=" in finding.advice


def test_a_full_disk_is_found(tmp_path: Path):
    findings = list(check_disk(tmp_path / "not" / "yet", lambda _: (10, 10, 1 << 20)))
    assert findings[0].verdict is Verdict.WRONG
    assert "FLASHRAY_CACHE" in findings[0].advice
    findings = list(check_disk(tmp_path, lambda _: (10, 10, 1 << 40)))
    assert all(finding.verdict is Verdict.OK for finding in findings)


def test_a_model_that_is_not_there_is_found():
    finding = check_model("/no/such/folder")
    assert finding.verdict is Verdict.WRONG
    assert "does not exist" in finding.advice


def test_a_foreign_ray_address_is_noted(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    findings = list(examine(AppConfig(model="/no/such"), 0))
    assert any("RAY_ADDRESS" in f.fact and f.verdict is Verdict.NOTE for f in findings)


def test_the_report_ends_with_the_number_of_problems(tmp_path: Path, capsys):
    config = tmp_path / "app.yaml"
    config.write_text("model: /no/such/folder\n")
    assert run_doctor(config, 0) == 1
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("1 problems")
    assert "WRONG  model" in printed
