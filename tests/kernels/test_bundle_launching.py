"""A launch gets its code from the bundle in the driver's form, or is compiled just in time and says
why, once."""

import logging
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels.bundle import launching
from kernels.bundle.bundle import Bundle
from kernels.bundle.index import Key
from kernels.bundle.launching import BundleWay
from kernels.contract import Contract, Output, Scalar, Size, Tensor
from kernels.errors import ContractError, CorruptBundle, KernelError
from kernels.launch import Launcher
from kernels.silu_mul import reference
from tests.fakes.kernel_driver import CPU, FakeDriver
from tests.kernels.bundles import code, codes, key, write_bundle


class JustInTime(Launcher):
    """Records what was left to Triton."""

    def __init__(self, contract: Contract = reference.CONTRACT) -> None:
        super().__init__(contract, "no:where")
        self.launches = []

    def kernel(self):
        return self

    def launch(self, grid, arguments, meta):
        self.launches.append((grid, tuple(arguments), dict(meta)))


META = {"BLOCK": 1024, "num_warps": 4}
BOTH = codes(80, 90) | codes(80, 90, is_aligned=False)


def arguments(rows: int = 2, size: int = 32, dtype: torch.dtype = torch.bfloat16):
    gate_up = torch.zeros(rows, 2 * size, dtype=dtype)
    return gate_up, torch.empty(rows, size, dtype=dtype), gate_up.stride(0), size


def launch(way: BundleWay, *given, meta=META) -> JustInTime:
    launcher = JustInTime()
    launcher.contract.check(*given)
    way(launcher, (2, 1), given, meta)
    return launcher


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def way(tmp_path, driver):
    write_bundle(tmp_path, BOTH)
    return BundleWay(Bundle.open(tmp_path), driver)


def test_launch(way, driver):
    gate_up, out, stride, size = arguments()
    assert launch(way, gate_up, out, stride, size).launches == []
    (told,) = driver.launches
    assert told.function.image == b"cubin of True 90"
    assert told.config == ((2, 1), 128, 0, False)
    assert told.stream == driver.current_stream(CPU)
    assert told.arguments == (gate_up.data_ptr(), out.data_ptr(), 64, 32, 0, 0)
    kinds = [int, int, np.int32, np.int32, int, int]
    assert [type(each) for each in told.arguments] == kinds


def test_code_is_loaded_once_per_variant_and_device(way, driver):
    for _ in range(3):
        launch(way, *arguments())
    launch(way, *arguments(size=33))
    assert [each.entry.key.is_aligned for each in driver.loaded] == [True, False]
    driver.device, driver.capabilities = 1, {1: 80}
    on_second = tuple(_on("cuda:1", each) for each in arguments())
    way(JustInTime(), (2, 1), on_second, META)
    assert [(each.device, each.entry.arch) for each in driver.loaded[2:]] == [(1, 80)]
    assert len(driver.launches) == 5


def test_aligned_code_is_for_aligned_steps_only(way, driver):
    launch(way, *arguments(size=16 * 7))
    launch(way, *arguments(size=16 * 7 + 8))
    wide = torch.zeros(2, 256, dtype=torch.bfloat16)
    launch(way, wide.as_strided((2, 64), (65, 1)), torch.empty(2, 32, dtype=wide.dtype), 65, 32)
    assert [each.function.entry.key.is_aligned for each in driver.launches] == [True, False, False]


def test_code_for_any_sizes_runs_aligned_ones(tmp_path, driver):
    write_bundle(tmp_path, codes(90, is_aligned=False))
    assert launch(BundleWay(Bundle.open(tmp_path), driver), *arguments()).launches == []
    assert driver.launches[0].function.image == b"cubin of False 90"


def test_float_scalars_and_shared_memory(tmp_path, driver):
    contract = Contract(
        "scaled", x=Tensor("size"), out=Output("size"), size=Size("size"), scale=Scalar(float)
    )
    scaled = key(kernel="scaled")
    write_bundle(tmp_path, {(scaled, 90): code("scaled", shared_bytes=100_000)})
    x = torch.zeros(16, dtype=torch.bfloat16)
    launcher = JustInTime(contract)
    BundleWay(Bundle.open(tmp_path), driver)(launcher, (1,), (x, x, 16, 0.1), META)
    (told,) = driver.launches
    assert told.config.shared_bytes == 100_000
    assert (type(told.arguments[3]), told.arguments[3]) == (np.float32, np.float32(0.1))


def test_a_kernel_that_waits_for_earlier_ones_starts_before_they_end(tmp_path, driver):
    write_bundle(
        tmp_path, {(key(), 80): code("early", waits=False), (key(), 90): code("late", waits=True)}
    )
    for capability in (80, 90):
        driver.device, driver.capabilities = CPU, {CPU: capability}
        launch(BundleWay(Bundle.open(tmp_path), driver), *arguments())
    assert [each.config.waits for each in driver.launches] == [False, True]


def _on(device: str, value):
    """A tensor that says it is elsewhere."""
    if not isinstance(value, torch.Tensor):
        return value

    class Elsewhere:
        dtype = value.dtype
        device = None
        data_ptr = value.data_ptr

        def get_device(self):
            return self.device.index

    Elsewhere.device = torch.device(device)
    return Elsewhere()


def test_a_tensor_on_another_device_is_refused(way, driver):
    driver.device = 0
    launcher = JustInTime()
    elsewhere = tuple(_on("cuda:1", each) for each in arguments())
    expected = "silu_mul: gate_up must be on the current device cuda:0, came cuda:1"
    with pytest.raises(ContractError, match=expected):
        way(launcher, (2, 1), elsewhere, META)
    assert launcher.launches == driver.launches == []


def test_a_launch_that_the_driver_refuses_names_its_kernel(way, driver):
    driver.max_programs = 1
    expected = r"silu_mul: .* launch of \(2, 1\) programs .*CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(KernelError, match=expected):
        launch(way, *arguments())


def warnings_of(caplog) -> list[str]:
    return [each.message for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("given", "meta", "why"),
    [
        (arguments(dtype=torch.float32), META, r"no silu_mul\(float32, float32; .* for sm_90"),
        (arguments(), META | {"BLOCK": 512}, "BLOCK=512"),
        (arguments(), {"BLOCK": 1024}, "; BLOCK=1024; aligned"),
    ],
)
def test_a_variant_that_was_not_built(way, driver, caplog, given, meta, why):
    for _ in range(2):
        assert launch(way, *given, meta=meta).launches == [((2, 1), given, meta)]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("kernel silu_mul is compiled just in time: ")
    assert re.search(why, warning), warning
    assert driver.launches == []


def test_no_code_for_the_gpu(tmp_path, driver, caplog):
    write_bundle(tmp_path, codes(90))
    driver.capabilities = {CPU: 120}
    assert len(launch(BundleWay(Bundle.open(tmp_path), driver), *arguments()).launches) == 1
    assert "for sm_120" in warnings_of(caplog)[0]


def test_ptx_where_no_cubin_fits(way, driver, caplog):
    driver.capabilities = {CPU: 120}
    assert launch(way, *arguments()).launches == []
    assert driver.launches[0].function.image == b"ptx of True 80"
    assert warnings_of(caplog) == []


def test_code_that_the_driver_refuses(way, driver, caplog):
    driver.refused, driver.capabilities = frozenset({"ptx"}), {CPU: 120}
    for _ in range(2):
        assert len(launch(way, *arguments()).launches) == 1
    (warning,) = warnings_of(caplog)
    assert "the ptx does not load" in warning


def test_one_warning_for_all_variants_of_a_kernel(way, driver, caplog):
    launch(way, *arguments(), meta=META | {"BLOCK": 512})
    launch(way, *arguments(dtype=torch.float32))
    assert len(warnings_of(caplog)) == 1


def test_a_stale_bundle(tmp_path, driver, caplog):
    write_bundle(tmp_path, BOTH, sources={"kernels/silu_mul/kernel.py": "0" * 64})
    way = BundleWay(Bundle.open(tmp_path), driver)
    for _ in range(2):
        assert len(launch(way, *arguments()).launches) == 1
    assert warnings_of(caplog) == [
        "kernel silu_mul is compiled just in time: the bundle is stale: "
        "kernels/silu_mul/kernel.py changed since"
    ]


def test_a_corrupt_bundle_is_an_error(tmp_path, driver):
    write_bundle(tmp_path, BOTH)
    (file,) = tmp_path.glob("sm_90-*")
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(CorruptBundle, match=file.name):
        launch(BundleWay(Bundle.open(tmp_path), driver), *arguments())


def test_scalars_of_more_than_32_bits(way, driver, caplog):
    gate_up, out, stride, size = arguments()
    launcher = JustInTime()
    for stride in (2**31, 2**31):  # of one row, the contract allows it
        way(launcher, (1, 1), (gate_up, out, stride, size), META)
    assert len(launcher.launches) == 2
    assert driver.launches == []
    assert len(warnings_of(caplog)) == 1
    way(launcher, (1, 1), (gate_up, out, 2**31 - 16, size), META)
    assert len(driver.launches) == 1


def test_without_a_bundle_nothing_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FLASHRAY_KERNEL_BUNDLE", str(tmp_path / "none"))
    monkeypatch.setattr(launching, "CudaDriver", FakeDriver)
    with caplog.at_level(logging.INFO):
        way = BundleWay.of_process()
        for _ in range(2):
            assert len(launch(way, *arguments()).launches) == 1
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", f"no kernel bundle in {tmp_path / 'none'}: kernels are compiled just in time")
    ]


@pytest.mark.parametrize(("value", "is_used"), [("1", False), ("True", False), ("0", True)])
def test_debugging_needs_code_with_assertions(tmp_path, monkeypatch, value, is_used):
    write_bundle(tmp_path, BOTH)
    monkeypatch.setenv("FLASHRAY_KERNEL_BUNDLE", str(tmp_path))
    monkeypatch.setenv("TRITON_DEBUG", value)
    monkeypatch.setattr(launching, "CudaDriver", FakeDriver)
    launcher = launch(BundleWay.of_process(), *arguments())
    assert (launcher.launches == []) == is_used


WITHOUT_TRITON = """
import sys
from pathlib import Path
import torch
from kernels.bundle.bundle import Bundle
from kernels.bundle.index import Key
from kernels.bundle.launching import BundleWay
from kernels.launch import launching
from kernels.silu_mul.api import silu_mul
from tests.fakes.kernel_driver import FakeDriver

driver = FakeDriver()
with launching(BundleWay(Bundle.open(Path(sys.argv[1])), driver)):
    silu_mul(torch.zeros(2, 64, dtype=torch.bfloat16))
assert len(driver.launches) == 1
assert "triton" not in sys.modules
"""


def test_an_op_launches_without_importing_triton(tmp_path):
    meta = tuple(sorted(reference.METAS[0].items()))
    own = Key("silu_mul", ("bfloat16", "bfloat16"), meta, is_aligned=True)
    write_bundle(tmp_path, {(own, 90): code("own", is_exact=True)})
    command = [sys.executable, "-c", WITHOUT_TRITON, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
