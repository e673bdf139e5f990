"""What is read is what was built, or is refused by the name of its file."""

import fcntl
import json

import pytest

from kernels.bundle import bundle as bundles_module
from kernels.bundle.bundle import Bundle
from kernels.bundle.index import INDEX, default_folder
from kernels.bundle.write import codes_of, locked
from kernels.errors import CorruptBundle
from tests.kernels.bundles import code, codes, key, write_bundle

REBUILD = "python -m kernels build"

# Triton compiles for plain sm_80 and sm_89, but for sm_90a and sm_100a, which no other GPU runs.
PICKS = [
    (75, None),
    (80, ("cubin", 80)),
    (86, ("cubin", 80)),
    (87, ("cubin", 80)),
    (89, ("cubin", 89)),
    (90, ("cubin", 90)),
    (100, ("cubin", 100)),
    (101, ("ptx", 80)),
    (103, ("ptx", 80)),
    (110, ("ptx", 80)),
    (120, ("ptx", 80)),
    (121, ("ptx", 80)),
]


@pytest.mark.parametrize(("capability", "expected"), PICKS)
def test_pick(tmp_path, capability, expected):
    write_bundle(tmp_path, codes(80, 89, 90, 100))
    entry = Bundle.open(tmp_path).pick(key(), capability)
    assert (entry and (entry.form, entry.arch)) == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(90, ("cubin", 90)), (100, ("cubin", 100)), (103, None), (80, None)],
)
def test_pick_without_code_that_others_run(tmp_path, capability, expected):
    write_bundle(tmp_path, codes(90, 100))
    entry = Bundle.open(tmp_path).pick(key(), capability)
    assert (entry and (entry.form, entry.arch)) == expected


def test_pick_of_a_plain_cubin_by_a_higher_minor(tmp_path):
    write_bundle(tmp_path, {(key(), 90): code("plain", is_exact=False)})
    bundle = Bundle.open(tmp_path)
    assert [bundle.pick(key(), each).form for each in (90, 93, 100)] == ["cubin", "cubin", "ptx"]


def test_pick_of_a_variant_that_is_not_there(tmp_path):
    write_bundle(tmp_path, codes(80))
    bundle = Bundle.open(tmp_path)
    assert bundle.pick(key(is_aligned=False), 80) is None
    assert bundle.pick(key(dtype="float16"), 80) is None


def test_what_is_written_is_read(tmp_path):
    written = codes(80, 89, 90) | codes(80, 90, is_aligned=False)
    index = write_bundle(tmp_path, written)
    bundle = Bundle.open(tmp_path)
    assert bundle.index == index
    read = codes_of(bundle)
    assert read.keys() == written.keys()
    for (each, arch), kept in read.items():
        ptx = written[each, arch].ptx if arch == 80 else b""  # of the lowest one only
        assert kept.ptx == ptx
        assert kept.cubin == written[each, arch].cubin
    assert {file.name.split("-")[0] for file in tmp_path.glob("*.ptx")} == {"sm_80"}


def test_the_same_code_makes_the_same_bytes(tmp_path):
    write_bundle(tmp_path / "one", codes(80, 90))
    write_bundle(tmp_path / "two", dict(reversed(codes(80, 90).items())))
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two


def test_a_reader_keeps_what_it_opened_while_another_build_is_written(tmp_path):
    write_bundle(tmp_path, codes(80, 90))
    reader = Bundle.open(tmp_path)
    write_bundle(tmp_path, {(key(), 90): code("another")})
    entry = reader.pick(key(), 90)
    assert reader.image(entry) == b"cubin of True 90"
    now = Bundle.open(tmp_path)
    assert now.image(now.pick(key(), 90)) == b"cubin of another"
    assert len(list(tmp_path.glob("sm_*"))) == len(now.index.files)


def test_builds_of_one_folder_wait_for_each_other(tmp_path):
    with (
        locked(tmp_path / "new"),
        (tmp_path / "new" / ".lock").open("w") as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with locked(tmp_path / "new"):
        pass


def test_changed_bytes(tmp_path):
    write_bundle(tmp_path, codes(80, 90))
    (file,) = tmp_path.glob("sm_90-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    bundle = Bundle.open(tmp_path)
    bundle.image(bundle.pick(key(), 80))
    with pytest.raises(CorruptBundle, match=rf"{file.name}: expected the sha256 .*{REBUILD}"):
        bundle.image(bundle.pick(key(), 90))


@pytest.mark.parametrize("cut_to", [1, 0, None])
def test_cut_and_missing_files(tmp_path, cut_to):
    write_bundle(tmp_path, codes(80, 90))
    (file,) = tmp_path.glob("sm_90-*")
    if cut_to is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:cut_to])
    with pytest.raises(CorruptBundle, match=rf"{file.name}: expected \d+ bytes, .*{REBUILD}"):
        Bundle.open(tmp_path)


def _set(name, value):
    return lambda content: content["entries"][0].__setitem__(name, value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.pop("format"),
        lambda content: content.update(format=1),
        lambda content: content.pop("triton"),
        lambda content: content.update(entries=None),
        lambda content: content.update(files=[]),
        lambda content: content.update(sources={}),
        lambda content: content["files"].update({"../outside": 1}),
        lambda content: content["entries"][0].pop("sha256"),
        _set("arch", "80"),
        _set("form", "fatbin"),
        _set("offset", -1),
        _set("offset", 10**9),
        _set("length", 0),
        _set("length", 10**9),
        _set("file", "sm_70-none.cubin"),
        _set("num_warps", True),
        _set("dtypes", "bfloat16"),
        _set("meta", None),
    ],
)
def test_an_index_that_is_not_one(tmp_path, spoil):
    write_bundle(tmp_path, codes(80))
    content = json.loads((tmp_path / INDEX).read_text())
    spoil(content)
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(CorruptBundle, match=rf"{INDEX}: expected .*{REBUILD}"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 1'])
def test_an_index_that_is_no_json_object(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CorruptBundle, match=rf"{INDEX}: expected .*{REBUILD}"):
        Bundle.open(tmp_path)


def test_no_bundle(tmp_path):
    with pytest.raises(FileNotFoundError):
        Bundle.open(tmp_path)


def test_stale_by_its_sources(tmp_path):
    write_bundle(tmp_path, codes(80), sources={"kernels/silu_mul/kernel.py": "0" * 64})
    why = Bundle.open(tmp_path).why_stale("silu_mul")
    assert why == "kernels/silu_mul/kernel.py changed since"


def test_stale_by_the_version_of_triton(tmp_path, monkeypatch):
    write_bundle(tmp_path, codes(80), triton="3.6.0")
    bundle = Bundle.open(tmp_path)
    monkeypatch.setattr(bundles_module, "installed_triton", lambda: "3.7.1")
    assert bundle.why_stale("silu_mul") == "built by triton 3.6.0, installed is 3.7.1"
    monkeypatch.setattr(bundles_module, "installed_triton", lambda: "3.6.0")
    assert bundle.why_stale("silu_mul") is None
    monkeypatch.setattr(
        bundles_module, "installed_triton", lambda: None
    )  # bundles are all there is
    assert bundle.why_stale("silu_mul") is None


def test_a_kernel_that_is_not_there(tmp_path):
    write_bundle(tmp_path, codes(80))
    assert Bundle.open(tmp_path).why_stale("resize") == "the bundle does not have this kernel"


def test_where_a_bundle_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHRAY_CACHE", raising=False)
    monkeypatch.delenv("FLASHRAY_KERNEL_BUNDLE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "flashray" / "kernels"
    monkeypatch.setenv("FLASHRAY_CACHE", "/cache")
    assert str(default_folder()) == "/cache/kernels"
    monkeypatch.setenv("FLASHRAY_KERNEL_BUNDLE", "/image/kernels")
    assert str(default_folder()) == "/image/kernels"
