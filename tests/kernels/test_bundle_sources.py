"""A bundle is stale when a file that its code depends on changed, and only then."""

from kernels.bundle.sources import changed_sources, sources_of


def _write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


FILES = {
    "kernels/__init__.py": "",
    "kernels/bundle/__init__.py": "",
    "kernels/bundle/compile.py": "from kernels.bundle.write import Code\nimport kernels.kernel\n",
    "kernels/bundle/write.py": "",
    "kernels/contract.py": "from kernels.errors import ContractError",
    "kernels/errors.py": "",
    "kernels/kernel.py": "import triton",
    "kernels/norm/__init__.py": "",
    "kernels/norm/kernel.py": (
        "import torch\nfrom kernels.contract import Contract\nfrom kernels.kernel import kernel\n"
        "from kernels.norm.reference import CONTRACT\nfrom kernels.shared import sums\n"
    ),
    "kernels/norm/reference.py": "from . import rows\nimport kernels.norm.kernel\n",
    "kernels/norm/rows.py": "from ..shared.sums import total as summed\n",
    "kernels/norm/unused.py": "",
    "kernels/shared/__init__.py": "",
    "kernels/shared/sums.py": "import kernels.shared.deep\ndef total(): ...\n",
    "kernels/shared/deep.py": "",
}


def test_all_that_is_imported_below_kernels(tmp_path):
    _write(tmp_path, FILES)
    assert list(sources_of("kernels.norm.kernel", tmp_path)) == [
        "kernels/bundle/compile.py",
        "kernels/contract.py",
        "kernels/kernel.py",
        "kernels/norm/__init__.py",
        "kernels/norm/kernel.py",
        "kernels/norm/reference.py",
        "kernels/norm/rows.py",
        "kernels/shared/__init__.py",
        "kernels/shared/deep.py",
        "kernels/shared/sums.py",
    ]


def test_changed_and_missing_files(tmp_path):
    _write(tmp_path, FILES)
    recorded = sources_of("kernels.norm.kernel", tmp_path)
    assert changed_sources(recorded, tmp_path) == []
    (tmp_path / "kernels/shared/deep.py").write_text("# now\n")
    (tmp_path / "kernels/norm/rows.py").unlink()
    expected = ["kernels/norm/rows.py", "kernels/shared/deep.py"]
    assert changed_sources(recorded, tmp_path) == expected


def test_of_a_shipped_kernel():
    paths = sources_of("kernels.silu_mul.kernel")
    own = {"kernels/silu_mul/kernel.py", "kernels/silu_mul/reference.py"}
    assert own | {"kernels/bundle/compile.py", "kernels/contract.py", "kernels/kernel.py"} <= {
        *paths
    }
    assert not {path for path in paths if path.startswith("kernels/rms_norm")}
    assert changed_sources(paths) == []
