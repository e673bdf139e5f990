"""`python -m kernels`: a real kernel is compiled for GPUs that this host does not have."""

import json
import os
import re
import subprocess
import sys

import pytest

from kernels.__main__ import _bar
from kernels.bundle.bundle import Bundle
from kernels.bundle.index import INDEX
from kernels.registry import all_kernels

OPTIONS = ("--arch", "80", "--arch", "90")
KERNEL = ("--kernel", "silu_mul")
NUM_VARIANTS = len(all_kernels()["silu_mul"].variants)
WIDE_READ = re.compile(rb"ld\.global\S*\.v4\.b32")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernels", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # the command sees to it
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environment
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    ran = run("build", "--out", str(folder), *OPTIONS, *KERNEL)
    assert ran.returncode == 0, ran.stderr
    num = 2 * NUM_VARIANTS
    assert f" {num} compiled, 0 kept" in ran.stdout
    assert ran.stderr.splitlines()[-1] == f"compiled {num} of {num}, last silu_mul"
    return folder


def test_what_was_built(built):
    bundle = Bundle.open(built)
    entries = bundle.index.entries
    assert {(entry.form, entry.arch, entry.is_exact) for entry in entries} == {
        ("cubin", 80, False),
        ("ptx", 80, False),
        ("cubin", 90, True),
    }
    assert {entry.symbol for entry in entries} == {"silu_mul_kernel"}
    for entry in entries:
        assert bundle.image(entry).startswith(b"\x7fELF" if entry.form == "cubin" else b"//")


def test_aligned_code_reads_sixteen_bytes_at_once(built):
    bundle = Bundle.open(built)
    reads = {
        entry.key.is_aligned: bool(WIDE_READ.search(bundle.image(entry)))
        for entry in bundle.index.entries
        if entry.form == "ptx" and entry.key.dtypes[0] == "bfloat16"
    }
    assert reads == {True: True, False: False}


def test_build_again_compiles_what_changed(built):
    untouched = {file.name: file.read_bytes() for file in built.iterdir()}
    ran = run("build", "--out", str(built), *OPTIONS, *KERNEL)
    assert f" 0 compiled, {2 * NUM_VARIANTS} kept" in ran.stdout
    assert {file.name: file.read_bytes() for file in built.iterdir()} == untouched


def test_build_of_one_architecture_more_keeps_the_others(built, tmp_path):
    for file in built.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / INDEX).read_text())
    content["sources"]["silu_mul"]["kernels/silu_mul/kernel.py"] = "0" * 64
    (tmp_path / INDEX).write_text(json.dumps(content))
    assert "stale: kernels/silu_mul/kernel.py" in run("list", "--dir", str(tmp_path)).stdout
    ran = run("build", "--out", str(tmp_path), "--arch", "89", *KERNEL)
    assert f" {NUM_VARIANTS} compiled, 0 kept" in ran.stdout
    assert {entry.arch for entry in Bundle.open(tmp_path).index.entries} == {89}
    ran = run("build", "--out", str(tmp_path), "--arch", "80", *KERNEL)
    assert {entry.arch for entry in Bundle.open(tmp_path).index.entries} == {80, 89}
    ptx = [entry.arch for entry in Bundle.open(tmp_path).index.entries if entry.form == "ptx"]
    assert {*ptx} == {80}


def test_list(built):
    ran = run("list", "--dir", str(built))
    assert ran.returncode == 0
    name, variants, num_bytes, *archs, state = ran.stdout.splitlines()[-1].split()
    assert (name, variants, archs, state) == (
        "silu_mul",
        f"{NUM_VARIANTS}",
        ["80", "90"],
        "built",
    )
    assert int(num_bytes) == sum(file.stat().st_size for file in built.glob("sm_*"))


def test_verify_says_what_is_missing(built):
    ran = run("verify", "--dir", str(built), *OPTIONS)
    assert ran.returncode == 1
    assert "rms_norm: stale: the bundle does not have this kernel" in ran.stdout
    assert not any(line.startswith("silu_mul") for line in ran.stdout.splitlines())
    ran = run("verify", "--dir", str(built), "--arch", "100")
    assert (
        "silu_mul(bfloat16, bfloat16; BLOCK=2048 STREAM=0 num_warps=8; aligned): missing for sm_100"
        in (ran.stdout)
    )


def test_verify_names_the_corrupt_file(built, tmp_path):
    for file in built.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (file,) = tmp_path.glob("sm_90-*")
    file.write_bytes(b"x" * file.stat().st_size)
    ran = run("verify", "--dir", str(tmp_path), *OPTIONS)
    assert ran.returncode == 1
    assert file.name in ran.stdout


def test_there_is_no_bundle(tmp_path):
    for command in ("list", "verify"):
        ran = run(command, "--dir", str(tmp_path))
        assert ran.returncode == 1
        assert "there is no bundle" in ran.stdout + ran.stderr


def test_a_kernel_that_there_is_not(tmp_path):
    ran = run("build", "--out", str(tmp_path), "--kernel", "resise")
    assert ran.returncode == 2
    assert "no kernel resise; there are " in ran.stderr
    assert not (tmp_path / INDEX).exists()


def test_nothing_is_compiled_while_kernels_are_interpreted():
    """Tests run with TRITON_INTERPRET=1."""
    from kernels.bundle.compile import Task, compiled
    from kernels.errors import BundleError
    from kernels.registry import all_kernels

    task = Task("silu_mul", all_kernels()["silu_mul"].variants[0], 80)
    with pytest.raises(BundleError, match=r"silu_mul: .*TRITON_INTERPRET=1"):
        compiled(task)


def test_a_bar_on_a_terminal(capsys):
    progress = _bar()
    for done in (1, 6, 12):
        progress(done, 12, "silu_mul")
    one, half, whole = capsys.readouterr().err.split("\r")[1:]
    assert one.startswith("[##     ")
    assert half.startswith(f"[{'#' * 15}{' ' * 15}] 6/12 silu_mul ")
    assert (whole[:32], whole[-1]) == (f"[{'#' * 30}]", "\n")
