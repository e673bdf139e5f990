"""What pods keep where: memory that counts against their limit, and one volume for what all of them
must find: the model, its conversion, the audit."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from deployments.config import AppConfig
from tests.contract.kuberay import Cluster
from tests.contract.manifest import Document, Manifest, quantity, worker_resources

CACHE_VARIABLE = "FLASHRAY_CACHE"


def memory_limit_faults(cluster: Cluster) -> Iterator[str]:
    """A volume in memory counts against the limit of the pod that fills it."""
    for field, group in cluster.groups():
        spec, limit = group["template"]["spec"], worker_resources(group)["memory"]
        for position, volume in enumerate(spec.get("volumes", ())):
            size = volume.get("emptyDir", {}).get("sizeLimit")
            if size is not None and quantity(size) > limit / 2:
                yield cluster.fault(
                    f"{field}.template.spec.volumes[{position}].emptyDir.sizeLimit",
                    f"{size} counts against the pod's memory limit and is over half of it",
                )


def data_faults(
    cluster: Cluster, config: AppConfig, field: str, manifests: Sequence[Manifest]
) -> Iterator[str]:
    """A model of its own, its cache and the audit lie on one claim that every pod mounts."""
    paths = {}
    if config.model.startswith("/"):
        paths[f"{field}.model"] = config.model
    if config.audit.folder is not None:
        paths[f"{field}.audit.folder"] = str(config.audit.folder)
    for place, group in cluster.groups():
        container = group["template"]["spec"]["containers"][0]
        mounted = claim_mounts(group)
        for path_field, path in paths.items():
            if not is_below(path, mounted):
                message = f"{path} is on no claim that {place} mounts: {sorted(mounted)}"
                yield cluster.manifest.fault(path_field, message)
        if config.model.startswith("/"):
            env = f"{place}.template.spec.containers[0].env"
            yield from cache_faults(cluster, env, container.get("env", ()), mounted)
    yield from claim_faults(cluster, manifests)


def cache_faults(
    cluster: Cluster, field: str, variables: Sequence[Document], mounted: set[str]
) -> Iterator[str]:
    names = [variable["name"] for variable in variables]
    if CACHE_VARIABLE not in names:
        yield cluster.fault(field, f"expected {CACHE_VARIABLE}, on a claim: {sorted(mounted)}")
        return
    position = names.index(CACHE_VARIABLE)
    folder = variables[position].get("value", "")
    if not is_below(folder, mounted):
        message = f"expected a folder on a claim, {sorted(mounted)}, got {folder}"
        yield cluster.fault(f"{field}[{position}].value", message)


def claim_mounts(group: Document) -> set[str]:
    spec = group["template"]["spec"]
    claims = {v["name"] for v in spec.get("volumes", ()) if "persistentVolumeClaim" in v}
    mounts = spec["containers"][0].get("volumeMounts", ())
    return {mount["mountPath"] for mount in mounts if mount["name"] in claims}


def is_below(path: str, folders: set[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def claim_faults(cluster: Cluster, manifests: Sequence[Manifest]) -> Iterator[str]:
    claims = {m.name: m for m in manifests if m.kind == "PersistentVolumeClaim"}
    for field, group in cluster.groups():
        for position, volume in enumerate(group["template"]["spec"].get("volumes", ())):
            name = volume.get("persistentVolumeClaim", {}).get("claimName")
            place = f"{field}.template.spec.volumes[{position}].persistentVolumeClaim.claimName"
            if name is not None and name not in claims:
                yield cluster.fault(place, f"expected one of {sorted(claims)}, got {name!r}")
    for claim in claims.values():
        modes = claim.document["spec"].get("accessModes", [])
        if "ReadWriteMany" not in modes:
            message = f"expected ReadWriteMany, pods of several nodes mount it: got {modes}"
            yield claim.fault("spec.accessModes", message)
