import copy
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.contract.kuberay import CRDS, operator_faults, schema_faults
from tests.contract.manifest import BASE, OVERLAYS, ROOT, Document, Manifest, load, render
from tests.contract.manifest_rules import faults_of
from tests.contract.planted import (
    BUDGET,
    GATEWAY,
    PLANTED,
    POLICY,
    SERVICE,
    VALKEY,
    Fault,
    incremental,
)
from tests.contract.planted_overlays import PLANTED_OVERLAYS

MIN_WORKERS = {"cpu-demo": 1, "h200": 2}  # a demonstration may go down with its only worker
needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason=f"no KubeRay CRDs at {CRDS}: set KUBERAY_CRDS"
)


@pytest.fixture(scope="module")
def shipped() -> list[Manifest]:
    return render()


@pytest.fixture(scope="module")
def overlays() -> dict[str, list[Manifest]]:
    return {name: render(OVERLAYS / name) for name in MIN_WORKERS}


def planted(manifests: list[Manifest], kind: str, fault: Fault) -> list[Manifest]:
    changed = copy.deepcopy(manifests)
    fault(next(manifest.document for manifest in changed if manifest.kind == kind))
    return changed


@needs_crds
def test_shipped_manifests_have_no_fault(shipped: list[Manifest]) -> None:
    assert faults_of(shipped) == []


@needs_crds
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_named_by_file_and_field(name: str, shipped: list[Manifest]) -> None:
    kind, fault, expected = PLANTED[name]
    file = next(manifest.file for manifest in shipped if manifest.kind == kind)
    faults = faults_of(planted(shipped, kind, fault))
    assert any(line.startswith(f"{file}: {kind}/") for line in faults), faults
    assert any(re.search(expected, line) for line in faults), faults


@needs_crds
@pytest.mark.parametrize("overlay", MIN_WORKERS)
def test_shipped_overlay_has_no_fault(overlay: str, overlays: dict[str, list[Manifest]]) -> None:
    assert faults_of(overlays[overlay], min_workers=MIN_WORKERS[overlay]) == []


@needs_crds
@pytest.mark.parametrize("name", PLANTED_OVERLAYS)
def test_fault_of_an_overlay_is_named_by_the_file_that_wrote_the_field(
    name: str, overlays: dict[str, list[Manifest]]
) -> None:
    file, kind, fault, expected = PLANTED_OVERLAYS[name]
    overlay = file.partition("/")[0] if not file.startswith("base/") else "h200"
    changed = planted(overlays[overlay], kind, fault)
    faults = faults_of(changed, min_workers=MIN_WORKERS[overlay])
    lines = [line for line in faults if line.startswith(f"{file}: {kind}/")]
    assert any(re.search(expected, line) for line in lines), faults


def test_every_overlay_is_checked() -> None:
    assert {folder.name for folder in OVERLAYS.iterdir()} == MIN_WORKERS.keys()


PATCH_FAULTS = {
    "replaced field that is not there": (
        "/spec/upgradeStrategy/type",
        "/spec/upgradeStrategy/kind",
        r"/spec/upgradeStrategy/kind: cannot replace: KeyError",
    ),
    "worker group that is not there": (
        "/spec/rayClusterConfig/workerGroupSpecs/0/replicas",
        "/spec/rayClusterConfig/workerGroupSpecs/1/replicas",
        r"workerGroupSpecs/1/replicas: cannot replace: IndexError",
    ),
    "misspelt parent": (
        "workerGroupSpecs/0/maxReplicas",
        "workerGroupSpec/0/maxReplicas",
        r"workerGroupSpec/0/maxReplicas: cannot replace: KeyError",
    ),
    "unknown operation": (
        "op: remove",
        "op: delete",
        r"autoscalerOptions: cannot delete: ValueError",
    ),
}


def demo_with(tmp_path: Path, file: str, old: str, new: str) -> Path:
    copied = shutil.copytree(BASE.parent, tmp_path / "k8s") / "overlays" / "cpu-demo"
    text = (copied / file).read_text()
    assert old in text
    (copied / file).write_text(text.replace(old, new, 1))
    return copied


@pytest.mark.parametrize("name", PATCH_FAULTS)
def test_patch_that_does_not_apply_is_named(name: str, tmp_path: Path) -> None:
    old, new, expected = PATCH_FAULTS[name]
    folder = demo_with(tmp_path, "rayservice.yaml", old, new)
    with pytest.raises(ValueError, match=f"^cpu-demo/rayservice.yaml: RayService/.*{expected}"):
        render(folder)


def test_patch_of_a_resource_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = demo_with(tmp_path, "kustomization.yaml", "name: flashray-valkey", "name: valkey")
    with pytest.raises(
        ValueError, match=r"^cpu-demo/valkey\.yaml: expected one resource .*found 0"
    ):
        render(folder)


@needs_crds
def test_working_incremental_upgrade_has_no_fault(shipped: list[Manifest]) -> None:
    assert faults_of(planted(shipped, SERVICE, incremental(**GATEWAY, maxSurgePercent=20))) == []


@needs_crds
def test_filled_in_example_secret_is_refused(shipped: list[Manifest]) -> None:
    examples = copy.deepcopy(load(BASE / "secret.example.yaml"))
    examples[0].document["stringData"]["password"] = "hunter2"
    [fault] = faults_of(shipped, examples)
    place = "base/secret.example.yaml: Secret/flashray-valkey: stringData.password: "
    assert fault.startswith(place)
    assert "hunter2" not in fault


@needs_crds
def test_secret_among_the_resources_is_refused(shipped: list[Manifest]) -> None:
    secret = load(BASE / "secret.example.yaml")[0]
    assert any("never kept here" in fault for fault in faults_of([*shipped, secret]))


JOB_FAULTS: dict[str, tuple[Document, str]] = {
    "suspend": ({"suspend": True}, r"spec\.suspend: "),
    "ttl": ({"ttlSecondsAfterFinished": 60}, r"spec\.ttlSecondsAfterFinished: "),
    "deadline": ({"activeDeadlineSeconds": 0}, r"spec\.activeDeadlineSeconds: "),
    "retries": ({"submissionMode": "InteractiveMode", "backoffLimit": 1}, r"spec\.backoffLimit: "),
    "selector": ({"clusterSelector": {"cluster": "a"}}, r"spec\.clusterSelector: "),
    "environment": ({"runtimeEnvYAML": "a: ["}, r"spec\.runtimeEnvYAML: not YAML"),
    "no cluster": ({"rayClusterSpec": None}, r"spec\.rayClusterSpec: expected it, or"),
    "redis": ({}, r"rayClusterSpec\.headGroupSpec\.rayStartParams\.redis-username: "),
}


def job(shipped: list[Manifest], changes: Document) -> Manifest:
    service = next(manifest for manifest in shipped if manifest.kind == SERVICE)
    cluster = copy.deepcopy(service.document["spec"]["rayClusterConfig"])
    if not changes:
        cluster["headGroupSpec"]["rayStartParams"]["redis-username"] = "default"
    spec = {"entrypoint": "python -m deployments.jobs.serve", "rayClusterSpec": cluster, **changes}
    spec = {name: value for name, value in spec.items() if value is not None}
    document = {"apiVersion": "ray.io/v1", "kind": "RayJob", "spec": spec}
    return Manifest("job.yaml", document | {"metadata": {"name": "flashray-serve"}})


@needs_crds
def test_job_without_a_fault_passes(shipped: list[Manifest]) -> None:
    good = job(shipped, {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 60})
    assert [*schema_faults(good), *operator_faults(good)] == []


@needs_crds
@pytest.mark.parametrize("name", JOB_FAULTS)
def test_job_fault_is_named(name: str, shipped: list[Manifest]) -> None:
    changes, expected = JOB_FAULTS[name]
    faults = operator_faults(job(shipped, changes))
    assert [fault for fault in faults if re.search(f"^job.yaml: .*{expected}", fault)], faults


@needs_crds
def test_misspelt_field_of_a_cluster_is_named(shipped: list[Manifest]) -> None:
    service = next(manifest for manifest in shipped if manifest.kind == SERVICE)
    spec = copy.deepcopy(service.document["spec"]["rayClusterConfig"])
    document = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "flashray"}}
    cluster = Manifest("cluster.yaml", document | {"spec": spec})
    assert [*schema_faults(cluster), *operator_faults(cluster)] == []
    spec["workerGroupSpec"] = []
    [fault] = schema_faults(cluster)
    assert fault.startswith("cluster.yaml: RayCluster/flashray: spec: ")
    assert "'workerGroupSpec' was unexpected" in fault


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize(
    "folder", [BASE, *(OVERLAYS / name for name in MIN_WORKERS)], ids=lambda f: f.name
)
def test_rendering_is_kubectls(folder: Path) -> None:
    rendered = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, check=True, timeout=60
    )
    theirs = list(yaml.safe_load_all(rendered.stdout))
    ours = [manifest.document for manifest in render(folder)]

    def key(document: Document) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(ours, key=key) == sorted(theirs, key=key)


def test_selectors_reach_the_pods_they_are_for(shipped: list[Manifest]) -> None:
    by_name = {(manifest.kind, manifest.name): manifest.document for manifest in shipped}
    cluster = by_name[SERVICE, "flashray"]["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    ray_labels = [group["template"]["metadata"]["labels"] for group in groups]
    valkey = by_name[VALKEY, "flashray-valkey"]["spec"]["template"]["metadata"]["labels"]
    policy = by_name[POLICY, "flashray-ray"]["spec"]["podSelector"]["matchLabels"]
    assert all(policy.items() <= labels.items() for labels in ray_labels)
    assert not policy.items() <= valkey.items()
    for kind, field in ((POLICY, "podSelector"), (VALKEY, "selector")):
        selector = by_name[kind, "flashray-valkey"]["spec"][field]["matchLabels"]
        assert selector.items() <= valkey.items()
    assert by_name["Service", "flashray-valkey"]["spec"]["selector"].items() <= valkey.items()
    budget = by_name[BUDGET, "flashray-workers"]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= (ray_labels[1] | {"ray.io/node-type": "worker"}).items()


def test_image_and_manifest_run_the_ray_that_is_pinned(shipped: list[Manifest]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pinned] = [name for name in project["dependencies"] if name.startswith("ray[")]
    version = pinned.partition("==")[2]
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text()
    service = next(manifest for manifest in shipped if manifest.kind == SERVICE)
    assert f"RAY_IMAGE=rayproject/ray:{version}-py311\n" in dockerfile
    assert service.document["spec"]["rayClusterConfig"]["rayVersion"] == version


def test_image_holds_every_package() -> None:
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text()
    for package in ("cluster", "deployments", "engine", "kernels", "router"):
        assert f"COPY --chown=ray:users {package} /opt/flashray/{package}\n" in dockerfile
    assert "PYTHONPATH=/opt/flashray" in dockerfile
