"""What KubeRay 1.7 accepts: its CRD schemas, read strictly, and the rules that its operator holds
resources to beyond them. Every rule yields faults that name file and field."""

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests.contract.manifest import ROOT, Document, Manifest

CRDS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "crds"))
CLUSTER_FIELDS = {
    "RayCluster": "spec",
    "RayService": "spec.rayClusterConfig",
    "RayJob": "spec.rayClusterSpec",
}
OBJECT_META = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}
MAX_NAME_LENGTHS = {"RayCluster": 53, "RayService": 47, "RayJob": 47}


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused, where the API server would drop them in silence."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if schema.get("type") == "object" and not keeps_unknown:
        result.setdefault("additionalProperties", False)
    return result


@functools.cache
def validator(kind: str) -> Draft202012Validator:
    file = CRDS / f"ray.io_{kind.lower()}s.yaml"
    crd = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    [version] = [entry for entry in crd["spec"]["versions"] if entry["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = OBJECT_META
    return Draft202012Validator(schema)


def schema_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.document.get("apiVersion") != "ray.io/v1":
        yield manifest.fault("apiVersion", f"expected ray.io/v1, got {manifest.document!r:.60}")
    for error in validator(manifest.kind).iter_errors(manifest.document):
        yield manifest.fault(error.json_path.removeprefix("$."), error.message)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster inside a RayCluster, RayService or RayJob."""

    manifest: Manifest
    field: str
    spec: Document

    @classmethod
    def of(cls, manifest: Manifest) -> "Cluster | None":
        field = CLUSTER_FIELDS[manifest.kind]
        spec: Any = manifest.document
        for part in field.split("."):
            spec = spec.get(part) if isinstance(spec, dict) else None
        return cls(manifest, field, spec) if spec is not None else None

    def fault(self, field: str, message: str) -> str:
        return self.manifest.fault(f"{self.field}.{field}", message)

    def groups(self) -> Iterator[tuple[str, Document]]:
        yield "headGroupSpec", self.spec["headGroupSpec"]
        for position, group in enumerate(self.spec.get("workerGroupSpecs", ())):
            yield f"workerGroupSpecs[{position}]", group

    def head_variables(self) -> dict[str, Document]:
        container = self.spec["headGroupSpec"]["template"]["spec"]["containers"][0]
        return {variable["name"]: variable for variable in container.get("env", ())}

    @property
    def is_autoscaled(self) -> bool:
        return bool(self.spec.get("enableInTreeAutoscaling"))

    @property
    def annotations(self) -> Document:
        annotations: Document = self.manifest.document["metadata"].get("annotations", {})
        return annotations


def containers_exist(cluster: Cluster) -> Iterator[str]:
    for field, group in cluster.groups():
        if not group["template"]["spec"].get("containers"):
            yield cluster.fault(f"{field}.template.spec.containers", "expected one or more")


def resources_in_one_place(cluster: Cluster) -> Iterator[str]:
    for field, group in cluster.groups():
        doubled = {"num-cpus", "num-gpus", "memory", "resources"} & group.get(
            "rayStartParams", {}
        ).keys()
        if doubled and group.get("resources"):
            yield cluster.fault(f"{field}.resources", f"also in rayStartParams: {sorted(doubled)}")


def labels_in_their_field(cluster: Cluster) -> Iterator[str]:
    for field, group in cluster.groups():
        if "labels" in group.get("rayStartParams", {}):
            yield cluster.fault(f"{field}.rayStartParams.labels", f"use {field}.labels instead")


def redis_settings_in_one_place(cluster: Cluster) -> Iterator[str]:
    options = cluster.spec.get("gcsFaultToleranceOptions")
    variables, parameters = (
        cluster.head_variables(),
        cluster.spec["headGroupSpec"].get("rayStartParams", {}),
    )
    only = "set it in gcsFaultToleranceOptions alone"
    for name in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
        if name in variables:
            yield cluster.fault(f"headGroupSpec.template.spec.containers[0].env.{name}", only)
    for name in ("redis-password", "redis-username"):
        if name in parameters:
            yield cluster.fault(f"headGroupSpec.rayStartParams.{name}", only)
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if options is not None and name in cluster.annotations:
            yield cluster.manifest.fault(f"metadata.annotations.{name}", only)
    if cluster.manifest.kind == "RayService" and "externalStorageNamespace" in (options or {}):
        yield cluster.fault(
            "gcsFaultToleranceOptions.externalStorageNamespace",
            "leave it unset: two clusters of an upgrade must not share one",
        )


def autoscaler_settings(cluster: Cluster) -> Iterator[str]:
    variable, version = (
        "RAY_enable_autoscaler_v2",
        cluster.spec.get("autoscalerOptions", {}).get("version"),
    )
    if variable in cluster.head_variables():
        field = f"headGroupSpec.template.spec.containers[0].env.{variable}"
        yield cluster.fault(field, "use autoscalerOptions.version instead")
    for field, group in cluster.groups():
        policy = group["template"]["spec"].get("restartPolicy", "Never")
        if cluster.is_autoscaled and version == "v2" and policy != "Never":
            place = f"{field}.template.spec.restartPolicy"
            yield cluster.fault(place, f"autoscaler v2 expects Never or none, got {policy}")
        if cluster.is_autoscaled and group.get("suspend"):
            yield cluster.fault(f"{field}.suspend", "cannot be with the autoscaler on")


def worker_counts(cluster: Cluster) -> Iterator[str]:
    """The schema has required minReplicas and maxReplicas, with the autoscaler or without."""
    for field, group in list(cluster.groups())[1:]:
        least, most = group["minReplicas"], group["maxReplicas"]
        if not least <= group.get("replicas", least) <= most:
            yield cluster.fault(f"{field}.replicas", f"expected {least} to {most}")


def token_authentication(cluster: Cluster) -> Iterator[str]:
    options = cluster.spec.get("authOptions", {})
    version = re.match(r"(\d+)\.(\d+)\.\d+", cluster.spec.get("rayVersion", ""))
    is_old = version is None or (int(version[1]), int(version[2])) < (2, 52)
    if options.get("mode") == "token" and is_old:
        yield cluster.fault("rayVersion", "authOptions.mode token expects 2.52.0 or later")
    if options.get("enableK8sTokenAuth") and cluster.manifest.kind != "RayCluster":
        field = "authOptions.enableK8sTokenAuth"
        yield cluster.fault(field, f"not supported for a {cluster.manifest.kind}")


def name_is_short(manifest: Manifest) -> Iterator[str]:
    longest = MAX_NAME_LENGTHS[manifest.kind]
    if len(manifest.name) > longest or not re.fullmatch(
        "[a-z]([-a-z0-9]*[a-z0-9])?", manifest.name
    ):
        yield manifest.fault("metadata.name", f"expected a DNS label of at most {longest} letters")


def service_settings(manifest: Manifest) -> Iterator[str]:
    spec = manifest.document["spec"]
    for dead in ("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"):
        if dead in spec:
            yield manifest.fault(f"spec.{dead}", "the operator ignores it: remove it")
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield manifest.fault("spec.rayClusterDeletionDelaySeconds", "expected 0 or more")
    if "name" in spec["rayClusterConfig"]["headGroupSpec"].get("headService", {}).get(
        "metadata", {}
    ):
        field = "spec.rayClusterConfig.headGroupSpec.headService.metadata.name"
        yield manifest.fault(field, "must not be set for a RayService")
    kind = spec.get("upgradeStrategy", {}).get("type", "NewCluster")
    if kind not in ("NewCluster", "NewClusterWithIncrementalUpgrade", "None"):
        yield manifest.fault("spec.upgradeStrategy.type", f"{kind} is not a strategy")
    if kind == "NewClusterWithIncrementalUpgrade":
        yield from incremental_upgrade(manifest)


def incremental_upgrade(manifest: Manifest) -> Iterator[str]:
    spec = manifest.document["spec"]
    field = "spec.upgradeStrategy.clusterUpgradeOptions"
    options = spec["upgradeStrategy"].get("clusterUpgradeOptions")
    if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        place = "spec.rayClusterConfig.enableInTreeAutoscaling"
        yield manifest.fault(place, "an incremental upgrade expects true")
    if options is None:
        yield manifest.fault(field, "required by an incremental upgrade")
        return
    step, surge = options.get("stepSizePercent"), options.get("maxSurgePercent", 100)
    if not options.get("gatewayClassName"):
        yield manifest.fault(f"{field}.gatewayClassName", "required by an incremental upgrade")
    if options.get("intervalSeconds", 0) <= 0:
        yield manifest.fault(f"{field}.intervalSeconds", "expected more than 0")
    if not 0 <= surge <= 100:
        yield manifest.fault(f"{field}.maxSurgePercent", f"expected 0 to 100, got {surge}")
    if step is None or not 0 <= step <= surge:
        yield manifest.fault(f"{field}.stepSizePercent", f"expected 0 to {surge}, got {step}")


def job_settings(manifest: Manifest) -> Iterator[str]:
    spec = manifest.document["spec"]
    mode, selector = spec.get("submissionMode", "K8sJobMode"), spec.get("clusterSelector")
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    if spec.get("rayClusterSpec") is None and not selector:
        yield manifest.fault("spec.rayClusterSpec", "expected it, or spec.clusterSelector")
    if selector and "ray.io/cluster" not in selector:
        yield manifest.fault("spec.clusterSelector", "expected the key ray.io/cluster")
    if selector and mode == "SidecarMode":
        yield manifest.fault("spec.clusterSelector", "not supported in SidecarMode")
    if spec.get("suspend") and (selector or not shuts_down):
        yield manifest.fault("spec.suspend", "expects shutdownAfterJobFinishes, no clusterSelector")
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not shuts_down:
        yield manifest.fault("spec.ttlSecondsAfterFinished", "expects shutdownAfterJobFinishes")
    if spec.get("backoffLimit", 0) < 0 or (mode == "InteractiveMode" and spec.get("backoffLimit")):
        yield manifest.fault("spec.backoffLimit", "expected 0 or more, 0 in InteractiveMode")
    if spec.get("activeDeadlineSeconds", 1) <= 0:
        yield manifest.fault("spec.activeDeadlineSeconds", "expected more than 0")
    if mode == "SidecarMode" and ("submitterPodTemplate" in spec or "submitterConfig" in spec):
        yield manifest.fault("spec.submissionMode", "SidecarMode takes no submitter settings")
    if shuts_down and spec.get("deletionStrategy", {}).get("deletionRules"):
        field = "spec.deletionStrategy.deletionRules"
        yield manifest.fault(field, "exclude shutdownAfterJobFinishes")
    try:
        yaml.safe_load(spec.get("runtimeEnvYAML", ""))
    except yaml.YAMLError as exc:
        yield manifest.fault("spec.runtimeEnvYAML", f"not YAML: {exc}")


CLUSTER_RULES: tuple[Callable[[Cluster], Iterator[str]], ...] = (
    resources_in_one_place,
    labels_in_their_field,
    redis_settings_in_one_place,
    autoscaler_settings,
    worker_counts,
    token_authentication,
)
KIND_RULES: dict[str, tuple[Callable[[Manifest], Iterator[str]], ...]] = {
    "RayCluster": (name_is_short,),
    "RayService": (name_is_short, service_settings),
    "RayJob": (name_is_short, job_settings),
}


def operator_faults(manifest: Manifest) -> list[str]:
    """Faults by the operator's own rules; the schema's come first, this trusts the shape."""
    faults = [fault for rule in KIND_RULES[manifest.kind] for fault in rule(manifest)]
    cluster = Cluster.of(manifest)
    if cluster is None:
        return faults
    missing = list(containers_exist(cluster))
    if missing:
        return faults + missing
    return faults + [fault for rule in CLUSTER_RULES for fault in rule(cluster)]
