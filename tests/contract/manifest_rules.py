"""What Flashray holds its own manifests to: the app that they name can be built and placed, and no
secret stands in them."""

import functools
import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve.schema import ServeDeploySchema

from deployments.app import build_app
from deployments.config import AppConfig
from deployments.key_file import KEYS_FILE
from deployments.model_files import ModelFiles, ModelManifest
from tests.contract.kuberay import CLUSTER_FIELDS, Cluster, operator_faults, schema_faults
from tests.contract.manifest import (
    BASE,
    ROOT,
    Manifest,
    containers,
    load,
    pod_specs,
    quantity,
    walk,
    worker_resources,
)
from tests.contract.manifest_gpu_rules import (
    gpu_engine_faults,
    gpu_group_faults,
    rank_memory_faults,
)
from tests.contract.manifest_patch import below
from tests.contract.manifest_volume_rules import data_faults, memory_limit_faults

KUBERNETES_VERSION = "1.35"
PLACEHOLDER = "REPLACE_ME"
SECRET_NAME = re.compile(
    r"(PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|CREDENTIALS?|AUTH)$", re.IGNORECASE
)
SECRET_VALUE = re.compile(
    r"\bsk-[\w-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]*:[^/\s@]+@"
)
WRITES_PASSWORD = r"""printf 'requirepass %s\\n' "\$VALKEY_PASSWORD" > /run/valkey/password\.conf"""
SERVE = "spec.serveConfigV2"


def built_in_faults(manifest: Manifest) -> Iterator[str]:
    try:
        kubernetes_validate.validate(manifest.document, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as exc:
        path = functools.reduce(below, exc.path, "") or "(top)"
        yield manifest.fault(path, exc.message)


def app_faults(manifest: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    """serveConfigV2 parses, its builder exists here, its args are an AppConfig, and it fits."""
    try:
        content = yaml.safe_load(manifest.document["spec"].get("serveConfigV2", ""))
        schema = ServeDeploySchema.model_validate(content)
    except (yaml.YAMLError, ValidationError) as exc:
        yield manifest.fault(SERVE, f"not a Serve configuration: {exc}")
        return
    for unknown in content.keys() - ServeDeploySchema.model_fields.keys():
        yield manifest.fault(f"{SERVE}.{unknown}", "not a field of a Serve configuration")
    for position, application in enumerate(schema.applications):
        field = f"{SERVE}.applications[{position}]"
        yield from builder_faults(manifest, f"{field}.import_path", application.import_path)
        try:
            config = AppConfig.model_validate(application.args)
        except ValidationError as exc:
            for fault in exc.errors():
                place = ".".join(str(part) for part in fault["loc"])
                yield manifest.fault(f"{field}.args.{place}", fault["msg"])
            continue
        if "http" in config.model_fields_set:
            yield manifest.fault(f"{field}.args.http", "http_options decides on Kubernetes")
        cluster = Cluster.of(manifest)
        assert cluster is not None, "the schema requires a cluster"
        yield from placement_faults(manifest, config, f"{field}.args")
        yield from gpu_engine_faults(cluster, config, f"{field}.args")
        yield from rank_memory_faults(cluster, config)
        yield from data_faults(cluster, config, f"{field}.args", manifests)
        yield from limit_store_faults(manifest, config, f"{field}.args.limits.store")


def builder_faults(manifest: Manifest, field: str, import_path: str) -> Iterator[str]:
    module_name, _, attribute = import_path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        yield manifest.fault(field, f"{import_path}: {exc}")
        return
    if not (ROOT / module_name.partition(".")[0] / "__init__.py").is_file():
        yield manifest.fault(field, f"{module_name} is not of this repository")
    builder = getattr(module, attribute, None)
    if not inspect.isfunction(builder):
        yield manifest.fault(field, f"{attribute} is not a function of {module_name}")
        return
    parameters = inspect.signature(builder).parameters.values()
    annotations = [parameter.annotation for parameter in parameters]
    if annotations != [AppConfig]:
        yield manifest.fault(field, f"{import_path} does not take one AppConfig")


def deployments_of(application: serve.Application) -> Iterator[Any]:
    deployment = application._bound_deployment
    yield deployment
    for argument in (*deployment.init_args, *dict(deployment.init_kwargs).values()):
        if isinstance(argument, serve.Application):
            yield from deployments_of(argument)


def bundles_of(deployment: Any) -> list[dict[str, float]]:
    """What one replica asks of one node."""
    bundles = deployment._replica_config.placement_group_bundles
    if bundles:
        return list(bundles)
    options = deployment.ray_actor_options
    return [{"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0)}]


def demand(bundles: Sequence[dict[str, float]], resource: str) -> float:
    return sum(bundle.get(resource, 0) for bundle in bundles)


def placement_faults(manifest: Manifest, config: AppConfig, field: str) -> Iterator[str]:
    """Every replica fits a worker of some group, and all of them the workers there may be."""
    cluster = Cluster.of(manifest)
    assert cluster is not None, "the schema requires a cluster"
    groups = cluster.spec.get("workerGroupSpecs", ())
    sizes = [(worker_resources(group), group["maxReplicas"]) for group in groups]
    total = {"CPU": 0.0, "GPU": 0.0}
    for deployment in deployments_of(app_of_any_model(config)):
        bundles = bundles_of(deployment)
        wanted = {resource: demand(bundles, resource) for resource in total}
        if not any(all(wanted[name] <= size[name] for name in total) for size, _ in sizes):
            yield cluster.fault(
                "workerGroupSpecs", f"no worker has {wanted} for a replica of {deployment.name}"
            )
        for name in total:
            total[name] += wanted[name] * (deployment.num_replicas or 1)
    most = {name: sum(size[name] * count for size, count in sizes) for name in total}
    if any(total[name] > most[name] for name in total):
        yield cluster.fault("workerGroupSpecs", f"the app asks for {total}, there may be {most}")
    memory = max((size["memory"] for size, _ in sizes), default=0.0)
    kv_cache_bytes = config.engine.kv_cache_bytes or 0
    if config.engine.device == "cpu" and kv_cache_bytes > memory / 2:
        yield manifest.fault(
            f"{field}.engine.kv_cache_gib",
            f"{kv_cache_bytes / (1 << 30)} is over half a worker's {memory / (1 << 30):.0f} GiB",
        )


def limit_store_faults(manifest: Manifest, config: AppConfig, field: str) -> Iterator[str]:
    """All router replicas count in the Valkey of the cluster, with a password that they have."""
    cluster, limits = Cluster.of(manifest), config.limits
    assert cluster is not None, "the schema requires a cluster"
    address = cluster.spec.get("gcsFaultToleranceOptions", {}).get("redisAddress")
    if not limits.store.startswith(f"redis://{address}/"):
        yield manifest.fault(field, f"expected the Valkey of {address}, got {limits.store}")
    for place, group in list(cluster.groups())[1:]:
        container = group["template"]["spec"]["containers"][0]
        if limits.password_env not in {variable["name"] for variable in container.get("env", ())}:
            yield cluster.fault(
                f"{place}.template.spec.containers[0].env",
                f"expected {limits.password_env}, which args.limits names",
            )


def app_of_any_model(config: AppConfig) -> serve.Application:
    """Of a model whose heads can be dealt out to the ranks: which model it is, no manifest says."""
    size = config.engine.tensor_parallel_size
    heads = {"num_attention_heads": size, "num_key_value_heads": size}
    manifest = ModelManifest(
        "any", "any", "LlamaForCausalLM", "float32", 2048, 256, (0,), {}, "", {}
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(heads))
        return build_app(config, ModelFiles(Path(folder), manifest))


def availability_faults(cluster: Cluster, min_workers: int) -> Iterator[str]:
    """The head keeps the books only, and losing a pod is not losing the service."""
    head = cluster.spec["headGroupSpec"].get("rayStartParams", {})
    if head.get("num-cpus") != "0":
        found = head.get("num-cpus")
        yield cluster.fault("headGroupSpec.rayStartParams.num-cpus", f'expected "0", got {found!r}')
    if not cluster.manifest.document["spec"].get("excludeHeadPodFromServeSvc"):
        field = "spec.excludeHeadPodFromServeSvc"
        yield cluster.manifest.fault(field, "expected true: the head runs no Serve replicas")
    if "gcsFaultToleranceOptions" not in cluster.spec:
        yield cluster.fault("gcsFaultToleranceOptions", "required: the head may be replaced")
    groups = cluster.spec.get("workerGroupSpecs", ())
    if sum(group.get("minReplicas", 0) for group in groups) < min_workers:
        message = f"expected minReplicas of {min_workers} or more in all"
        yield cluster.fault("workerGroupSpecs", message)


def disruption_faults(cluster: Cluster, manifests: Sequence[Manifest]) -> Iterator[str]:
    """A budget that asks for all workers there may be forbids every drain."""
    groups = cluster.spec.get("workerGroupSpecs", ())
    num_workers = sum(group.get("minReplicas", 0) for group in groups)
    for manifest in manifests:
        if manifest.kind == "PodDisruptionBudget":
            least = manifest.document["spec"].get("minAvailable", 0)
            if least >= num_workers:
                message = f"expected less than the {num_workers} workers, got {least}"
                yield manifest.fault("spec.minAvailable", message)


def shared_memory_faults(cluster: Cluster) -> Iterator[str]:
    for field, group in cluster.groups():
        spec, place = group["template"]["spec"], f"{field}.template.spec.volumes"
        mounts = {m["mountPath"]: m["name"] for m in spec["containers"][0].get("volumeMounts", ())}
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        volume = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
        store_bytes = int(group.get("rayStartParams", {}).get("object-store-memory", 0))
        if volume.get("medium") != "Memory" or "sizeLimit" not in volume:
            yield cluster.fault(place, "expected a sized emptyDir in memory at /dev/shm")
        elif not 0 < store_bytes <= quantity(volume["sizeLimit"]):
            yield cluster.fault(
                f"{field}.rayStartParams.object-store-memory",
                f"expected 1 to the {volume['sizeLimit']} of /dev/shm, got {store_bytes}",
            )


def container_faults(manifest: Manifest) -> Iterator[str]:
    for path, spec in pod_specs(manifest.document):
        if not spec.get("securityContext", {}).get("runAsNonRoot"):
            yield manifest.fault(f"{path}.securityContext.runAsNonRoot", "expected true")
    for path, container in containers(manifest.document):
        for probe in ("readinessProbe", "livenessProbe"):
            if probe not in container:
                yield manifest.fault(f"{path}.{probe}", "required")
        for bound in ("requests", "limits"):
            given = container.get("resources", {}).get(bound, {})
            for resource in {"cpu", "memory"} - given.keys():
                yield manifest.fault(f"{path}.resources.{bound}.{resource}", "required")
        if container.get("securityContext", {}).get("allowPrivilegeEscalation") is not False:
            field = f"{path}.securityContext.allowPrivilegeEscalation"
            yield manifest.fault(field, "expected false")


def key_file_faults(cluster: Cluster) -> Iterator[str]:
    """$FLASHRAY_API_KEYS_FILE is a file of a Secret on every pod: the builder runs on any."""
    for field, group in cluster.groups():
        spec = group["template"]["spec"]
        container, place = spec["containers"][0], f"{field}.template.spec.containers[0].env"
        folders = {
            volume["name"]: [item["path"] for item in volume["secret"].get("items", ())]
            for volume in spec.get("volumes", ())
            if "secret" in volume
        }
        files = [
            f"{mount['mountPath']}/{path}"
            for mount in container.get("volumeMounts", ())
            for path in folders.get(mount["name"], ())
        ]
        values = [v.get("value") for v in container.get("env", ()) if v["name"] == KEYS_FILE]
        if len(values) != 1 or values[0] not in files:
            yield cluster.fault(f"{place}.{KEYS_FILE}", f"expected one of {files}, got {values}")


def secret_reference_faults(manifest: Manifest, secrets: dict[str, set[str]]) -> Iterator[str]:
    """Every Secret and key that is referred to is one that secret.example.yaml documents."""
    for path, node in walk(manifest.document):
        if not isinstance(node, dict):
            continue
        if isinstance(reference := node.get("secretKeyRef"), dict):
            wanted = [(f"{path}.secretKeyRef", reference.get("name"), reference.get("key"))]
        elif isinstance(reference := node.get("secretRef"), dict):
            wanted = [(f"{path}.secretRef", reference.get("name"), None)]
        elif re.search(r"\.imagePullSecrets\[\d+\]$", path):
            wanted = [(path, node.get("name"), None)]
        elif isinstance(name := node.get("secretName"), str) and path.endswith(".secret"):
            wanted = [(path, name, item["key"]) for item in node.get("items", ())]
            wanted = wanted or [(path, name, None)]
        else:
            continue
        for field, name, key in wanted:
            if name not in secrets or (key is not None and key not in secrets[name]):
                secret = name if key is None else f"{name}/{key}"
                yield manifest.fault(field, f"secret.example.yaml documents no {secret}")


def clear_text_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.kind == "Secret":
        yield manifest.fault("data", "a Secret is made by hand, never kept here")
    for path, node in walk(manifest.document):
        if isinstance(node, dict) and node.get("value"):
            name = str(node.get("name", path.rpartition(".")[2]))
            if SECRET_NAME.search(name):
                yield manifest.fault(f"{path}.value", f"{name} in clear text: use a secretKeyRef")
        if isinstance(node, str) and SECRET_VALUE.search(node):
            yield manifest.fault(path, "looks like a key in clear text")
        if isinstance(node, str) and re.search(r"requirepass\s+(?!%s)\S", node):
            yield manifest.fault(path, "requirepass in clear text: read it from the Secret")


def example_faults(manifest: Manifest) -> Iterator[str]:
    for key, value in {**manifest.document.get("stringData", {})}.items():
        if value != PLACEHOLDER:
            yield manifest.fault(f"stringData.{key}", f"expected the placeholder {PLACEHOLDER}")
    if manifest.document.get("data"):
        yield manifest.fault("data", f"expected stringData with {PLACEHOLDER}")


def valkey_faults(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Limits, audit and GCS state live there: a password, an append-only file, no eviction."""
    named = {
        manifest.kind: manifest for manifest in manifests if manifest.name == "flashray-valkey"
    }
    configuration, stateful_set = named["ConfigMap"], named["StatefulSet"]
    lines = configuration.document["data"]["valkey.conf"].splitlines()
    settings = dict(line.split(maxsplit=1) for line in lines if line.strip())
    for name, expected in {
        "appendonly": "yes",
        "maxmemory-policy": "noeviction",
        "include": "/run/valkey/password.conf",
    }.items():
        if settings.get(name) != expected:
            field = f"data.valkey.conf.{name}"
            yield configuration.fault(field, f"expected {expected}, got {settings.get(name)}")
    container = stateful_set.document["spec"]["template"]["spec"]["containers"][0]
    script = " ".join(container.get("args", ()))
    if not re.search(WRITES_PASSWORD, script):
        yield stateful_set.fault(
            "spec.template.spec.containers[0].args", "expected requirepass from $VALKEY_PASSWORD"
        )
    claims = stateful_set.document["spec"].get("volumeClaimTemplates", ())
    kept = {claim["metadata"]["name"] for claim in claims}
    mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
    if mounts.get(settings.get("dir", "")) not in kept:
        field = "spec.volumeClaimTemplates"
        yield stateful_set.fault(field, f"no claim is mounted at {settings.get('dir')}")


def redis_address_faults(cluster: Cluster, manifests: Sequence[Manifest]) -> Iterator[str]:
    address = cluster.spec.get("gcsFaultToleranceOptions", {}).get("redisAddress", "")
    known = [
        f"{manifest.name}:{port['port']}"
        for manifest in manifests
        if manifest.kind == "Service"
        for port in manifest.document["spec"]["ports"]
    ]
    if address not in known:
        field = "gcsFaultToleranceOptions.redisAddress"
        yield cluster.fault(field, f"expected one of {known}, got {address!r}")


def documented_secrets(examples: Sequence[Manifest]) -> dict[str, set[str]]:
    return {example.name: set(example.document.get("stringData", {})) for example in examples}


def faults_of(
    manifests: Sequence[Manifest],
    examples: Sequence[Manifest] | None = None,
    min_workers: int = 2,
) -> list[str]:
    """Every fault of a rendered set. Shapes first: the other rules trust them."""
    examples = load(BASE / "secret.example.yaml") if examples is None else examples
    ray = [manifest for manifest in manifests if manifest.kind in CLUSTER_FIELDS]
    plain = [manifest for manifest in manifests if manifest.kind not in CLUSTER_FIELDS]
    faults = [fault for manifest in ray for fault in schema_faults(manifest)]
    faults += [fault for manifest in (*plain, *examples) for fault in built_in_faults(manifest)]
    secrets = documented_secrets(examples)
    for manifest in manifests:
        faults += [*secret_reference_faults(manifest, secrets), *clear_text_faults(manifest)]
    faults += [fault for example in examples for fault in example_faults(example)]
    if faults:
        return faults
    for manifest in ray:
        faults += operator_faults(manifest)
        cluster = Cluster.of(manifest)
        if manifest.kind == "RayService" and cluster is not None:
            faults += availability_faults(cluster, min_workers)
            faults += redis_address_faults(cluster, manifests)
            faults += [*app_faults(manifest, manifests), *key_file_faults(cluster)]
            faults += disruption_faults(cluster, manifests)
        if cluster is not None:
            faults += [*shared_memory_faults(cluster), *memory_limit_faults(cluster)]
            faults += gpu_group_faults(cluster)
    faults += [fault for manifest in manifests for fault in container_faults(manifest)]
    return faults + list(valkey_faults(manifests))
