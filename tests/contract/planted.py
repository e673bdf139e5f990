"""Faults to plant in the shipped manifests, and what the checks must say of each."""

from collections.abc import Callable
from typing import Any

from tests.contract.manifest import Document

Fault = Callable[[Document], None]
Place = list[str | int]
REMOVED = object()

CLUSTER: Place = ["spec", "rayClusterConfig"]
HEAD: Place = [*CLUSTER, "headGroupSpec"]
WORKER: Place = [*CLUSTER, "workerGroupSpecs", 0]
HEAD_POD: Place = [*HEAD, "template", "spec"]
WORKER_POD: Place = [*WORKER, "template", "spec"]
HEAD_CONTAINER: Place = [*HEAD_POD, "containers", 0]
WORKER_CONTAINER: Place = [*WORKER_POD, "containers", 0]
VALKEY_CONTAINER: Place = ["spec", "template", "spec", "containers", 0]


def put(place: Place, value: Any) -> Fault:
    """Set, or with REMOVED delete, the field at `place`; lists grow by one."""

    def plant(document: Document) -> None:
        parent: Any = document
        for part in place[:-1]:
            parent = parent.setdefault(part, {}) if isinstance(part, str) else parent[part]
        if value is REMOVED:
            del parent[place[-1]]
        elif isinstance(parent, list) and place[-1] == len(parent):
            parent.append(value)
        else:
            parent[place[-1]] = value

    return plant


def say(place: Place, old: str, new: str) -> Fault:
    """Replace text inside the string at `place`."""

    def plant(document: Document) -> None:
        parent: Any = document
        for part in place[:-1]:
            parent = parent[part]
        assert old in parent[place[-1]], old
        parent[place[-1]] = parent[place[-1]].replace(old, new)

    return plant


def serve_config(old: str, new: str) -> Fault:
    return say(["spec", "serveConfigV2"], old, new)


def valkey_config(old: str, new: str) -> Fault:
    return say(["data", "valkey.conf"], old, new)


def all_of(*faults: Fault) -> Fault:
    def plant(document: Document) -> None:
        for fault in faults:
            fault(document)

    return plant


def variable(name: str, value: str) -> Document:
    return {"name": name, "value": value}


def incremental(**options: Any) -> Fault:
    strategy = {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": options}
    return put(["spec", "upgradeStrategy"], strategy)


SERVICE, VALKEY, CONFIGURATION = "RayService", "StatefulSet", "ConfigMap"
POLICY, BUDGET = "NetworkPolicy", "PodDisruptionBudget"
GATEWAY = {"gatewayClassName": "istio", "intervalSeconds": 10, "stepSizePercent": 5}
FT = [*CLUSTER, "gcsFaultToleranceOptions"]
PLANTED: dict[str, tuple[str, Fault, str]] = {
    "misspelt field": (
        SERVICE,
        all_of(put([*HEAD, "rayStartParam"], {}), put([*HEAD, "rayStartParams"], REMOVED)),
        r"headGroupSpec: .*'rayStartParam' was unexpected",
    ),
    "misspelt field deep in a pod": (
        SERVICE,
        put([*WORKER_CONTAINER, "resources", "limit"], {}),
        r"workerGroupSpecs\[0\].*containers\[0\]\.resources: .*'limit' was unexpected",
    ),
    "misspelt probe": (
        SERVICE,
        put([*WORKER_CONTAINER, "readinessProbes"], {}),
        r"containers\[0\]: .*'readinessProbes' was unexpected",
    ),
    "misspelt metadata": (
        SERVICE,
        put(["metadata", "label"], {}),
        r"metadata: .*'label' was unexpected",
    ),
    "wrong type": (
        SERVICE,
        put([*WORKER, "maxReplicas"], "four"),
        r"workerGroupSpecs\[0\]\.maxReplicas: 'four' is not of type 'integer'",
    ),
    "wrong enum": (
        SERVICE,
        put([*CLUSTER, "authOptions", "mode"], "password"),
        r"authOptions\.mode: 'password' is not one of",
    ),
    "wrong quantity": (
        SERVICE,
        put([*HEAD_CONTAINER, "resources", "limits", "memory"], "3 GB"),
        r"containers\[0\]\.resources\.limits\.memory: '3 GB' does not match",
    ),
    "old version": (SERVICE, put(["apiVersion"], "ray.io/v1alpha1"), r"apiVersion: expected ray"),
    "secret key that is not documented": (
        SERVICE,
        put([*FT, "redisPassword", "valueFrom", "secretKeyRef", "key"], "passwd"),
        r"redisPassword\.valueFrom\.secretKeyRef: .* documents no flashray-valkey/passwd",
    ),
    "secret volume that is not documented": (
        SERVICE,
        put([*WORKER_POD, "volumes", 1, "secret", "secretName"], "keys"),
        r"volumes\[1\]\.secret: .* documents no keys/api-keys",
    ),
    "clear-text Redis password": (
        SERVICE,
        put([*FT, "redisPassword"], {"value": "hunter2"}),
        r"gcsFaultToleranceOptions\.redisPassword\.value: redisPassword in clear text",
    ),
    "clear-text password in a variable": (
        VALKEY,
        put([*VALKEY_CONTAINER, "env", 0], variable("VALKEY_PASSWORD", "hunter2")),
        r"env\[0\]\.value: VALKEY_PASSWORD in clear text",
    ),
    "clear-text requirepass": (
        CONFIGURATION,
        valkey_config("appendonly", "requirepass hunter2\nappendonly"),
        r"data\.valkey\.conf: requirepass in clear text",
    ),
    "API key in the arguments": (
        SERVICE,
        serve_config("model: smollm2-135m-instruct", "model: sk-live-0123456789"),
        r"spec\.serveConfigV2: looks like a key",
    ),
    "head that runs Serve replicas": (
        SERVICE,
        put([*HEAD, "rayStartParams", "num-cpus"], "2"),
        r"headGroupSpec\.rayStartParams\.num-cpus: expected \"0\", got '2'",
    ),
    "head in the Serve service": (
        SERVICE,
        put(["spec", "excludeHeadPodFromServeSvc"], REMOVED),
        r"spec\.excludeHeadPodFromServeSvc: expected true",
    ),
    "one worker": (
        SERVICE,
        put([*WORKER, "minReplicas"], 1),
        r"workerGroupSpecs: expected minReplicas of 2",
    ),
    "no fault tolerance": (
        SERVICE,
        put(FT, REMOVED),
        r"rayClusterConfig\.gcsFaultToleranceOptions: required",
    ),
    "autoscaling off without bounds": (
        SERVICE,
        all_of(
            put([*CLUSTER, "enableInTreeAutoscaling"], False),
            put([*WORKER, "minReplicas"], REMOVED),
        ),
        r"workerGroupSpecs\[0\]: 'minReplicas' is a required property",
    ),
    "replicas out of bounds": (
        SERVICE,
        put([*WORKER, "replicas"], 5),
        r"workerGroupSpecs\[0\]\.replicas: expected 2 to 4",
    ),
    "restart policy under autoscaler v2": (
        SERVICE,
        put([*WORKER_POD, "restartPolicy"], "Always"),
        r"workerGroupSpecs\[0\]\.template\.spec\.restartPolicy: autoscaler v2 expects Never",
    ),
    "autoscaler version twice": (
        SERVICE,
        put([*HEAD_CONTAINER, "env", 5], variable("RAY_enable_autoscaler_v2", "1")),
        r"env\.RAY_enable_autoscaler_v2: use autoscalerOptions\.version",
    ),
    "Redis address twice": (
        SERVICE,
        put([*HEAD_CONTAINER, "env", 5], variable("RAY_REDIS_ADDRESS", "flashray-valkey:6379")),
        r"env\.RAY_REDIS_ADDRESS: set it in gcsFaultToleranceOptions alone",
    ),
    "Redis password twice": (
        SERVICE,
        put([*HEAD, "rayStartParams", "redis-password"], "$REDIS_PASSWORD"),
        r"headGroupSpec\.rayStartParams\.redis-password: set it in gcsFault",
    ),
    "fault tolerance twice": (
        SERVICE,
        put(["metadata", "annotations"], {"ray.io/ft-enabled": "true"}),
        r"metadata\.annotations\.ray\.io/ft-enabled: set it in gcsFault",
    ),
    "Redis namespace shared by an upgrade": (
        SERVICE,
        put([*FT, "externalStorageNamespace"], "flashray"),
        r"gcsFaultToleranceOptions\.externalStorageNamespace: leave it unset",
    ),
    "Redis that is not there": (
        SERVICE,
        put([*FT, "redisAddress"], "redis:6379"),
        r"redisAddress: expected one of \['flashray-valkey:6379'\], got 'redis:6379'",
    ),
    "labels among the start parameters": (
        SERVICE,
        put([*WORKER, "rayStartParams", "labels"], "tier=cpu"),
        r"workerGroupSpecs\[0\]\.rayStartParams\.labels: use workerGroupSpecs\[0\]\.labels",
    ),
    "resources twice": (
        SERVICE,
        put([*HEAD, "resources"], {"CPU": "0"}),
        r"headGroupSpec\.resources: also in rayStartParams: \['num-cpus'\]",
    ),
    "token mode on an old Ray": (
        SERVICE,
        put([*CLUSTER, "rayVersion"], "2.51.1"),
        r"rayVersion: authOptions\.mode token expects 2\.52\.0",
    ),
    "Kubernetes tokens for a service": (
        SERVICE,
        put([*CLUSTER, "authOptions", "enableK8sTokenAuth"], True),
        r"authOptions\.enableK8sTokenAuth: not supported for a RayService",
    ),
    "unknown upgrade": (
        SERVICE,
        put(["spec", "upgradeStrategy", "type"], "Rolling"),
        r"spec\.upgradeStrategy\.type: Rolling is not a strategy",
    ),
    "incremental upgrade without a gateway": (
        SERVICE,
        incremental(**GATEWAY | {"gatewayClassName": ""}),
        r"clusterUpgradeOptions\.gatewayClassName: required by an incremental upgrade",
    ),
    "incremental upgrade in too large steps": (
        SERVICE,
        incremental(**GATEWAY | {"stepSizePercent": 50, "maxSurgePercent": 20}),
        r"clusterUpgradeOptions\.stepSizePercent: expected 0 to 20, got 50",
    ),
    "incremental upgrade without the autoscaler": (
        SERVICE,
        all_of(put([*CLUSTER, "enableInTreeAutoscaling"], False), incremental(**GATEWAY)),
        r"rayClusterConfig\.enableInTreeAutoscaling: an incremental upgrade expects true",
    ),
    "dead field": (
        SERVICE,
        put(["spec", "serviceUnhealthySecondThreshold"], 900),
        r"spec\.serviceUnhealthySecondThreshold: the operator ignores it",
    ),
    "long name": (SERVICE, put(["metadata", "name"], "f" * 48), r"metadata\.name: expected a DNS"),
    "import path without a module": (
        SERVICE,
        serve_config("deployments.serve_entry:app", "deployments.entry:app"),
        r"applications\[0\]\.import_path: .*No module named 'deployments\.entry'",
    ),
    "import path without a function": (
        SERVICE,
        serve_config("deployments.serve_entry:app", "deployments.serve_entry:application"),
        r"applications\[0\]\.import_path: application is not a function",
    ),
    "import path to another's module": (
        SERVICE,
        serve_config("deployments.serve_entry:app", "yaml:safe_load"),
        r"applications\[0\]\.import_path: yaml is not of this repository",
    ),
    "builder of something else": (
        SERVICE,
        serve_config("deployments.serve_entry:app", "deployments.app:build_app"),
        r"applications\[0\]\.import_path: deployments\.app:build_app does not take one AppConfig",
    ),
    "unknown argument": (
        SERVICE,
        serve_config("kv_cache_gib:", "kv_cache_gb:"),
        r"applications\[0\]\.args\.engine\.kv_cache_gb: Extra inputs",
    ),
    "address in the arguments": (
        SERVICE,
        serve_config("args:", "args:\n      http: {port: 9000}"),
        r"applications\[0\]\.args\.http: http_options decides",
    ),
    "limits that no pod shares": (
        SERVICE,
        serve_config("store: redis://flashray-valkey:6379/1", "store: embedded"),
        r"args\.limits\.store: expected the Valkey of .*, got embedded",
    ),
    "limits without their password": (
        SERVICE,
        serve_config("password_env: VALKEY_PASSWORD", "password_env: REDIS_SECRET"),
        r"workerGroupSpecs\[0\].*\.env: expected REDIS_SECRET, which args\.limits names",
    ),
    "Serve configuration that is no YAML": (
        SERVICE,
        serve_config("args:", "args: ["),
        r"spec\.serveConfigV2: not a Serve configuration",
    ),
    "unknown field of the Serve configuration": (
        SERVICE,
        serve_config("http_options:", "http_option:"),
        r"spec\.serveConfigV2\.http_option: not a field",
    ),
    "worker too small for the actors": (
        SERVICE,
        put([*WORKER_CONTAINER, "resources", "limits", "cpu"], "1"),
        r"workerGroupSpecs: no worker has .*'CPU': 1\.1.* for a replica of FlashEngine",
    ),
    "GPU engine on CPU workers": (
        SERVICE,
        serve_config("device: cpu", "device: cuda"),
        r"workerGroupSpecs: no worker has .*'GPU': 1.* for a replica of FlashEngine",
    ),
    "too few workers for all replicas": (
        SERVICE,
        serve_config("num_replicas: 2", "num_replicas: 100"),
        r"workerGroupSpecs: the app asks for .*'CPU': 11\.",
    ),
    "cache larger than the worker": (
        SERVICE,
        serve_config("kv_cache_gib: 1.0", "kv_cache_gib: 8.0"),
        r"args\.engine\.kv_cache_gib: 8\.0 is over half a worker's 6 GiB",
    ),
    "shared memory on disk": (
        SERVICE,
        put([*WORKER_POD, "volumes", 0, "emptyDir"], {}),
        r"workerGroupSpecs\[0\].*volumes: expected a sized emptyDir in memory",
    ),
    "object store larger than shared memory": (
        SERVICE,
        put([*WORKER, "rayStartParams", "object-store-memory"], "2147483648"),
        r"object-store-memory: expected 1 to the 1Gi of /dev/shm, got 2147483648",
    ),
    "key file that is not mounted": (
        SERVICE,
        put([*WORKER_CONTAINER, "volumeMounts", 1, "mountPath"], "/keys"),
        r"workerGroupSpecs\[0\].*env\.FLASHRAY_API_KEYS_FILE: expected one of \['/keys/api-keys'\]",
    ),
    "root": (
        SERVICE,
        put([*HEAD_POD, "securityContext", "runAsNonRoot"], REMOVED),
        r"headGroupSpec\.template\.spec\.securityContext\.runAsNonRoot: expected true",
    ),
    "no limits": (
        SERVICE,
        put([*HEAD_CONTAINER, "resources", "limits", "memory"], REMOVED),
        r"headGroupSpec.*resources\.limits\.memory: required",
    ),
    "no probe": (
        VALKEY,
        put([*VALKEY_CONTAINER, "livenessProbe"], REMOVED),
        r"containers\[0\]\.livenessProbe: required",
    ),
    "Valkey that evicts": (
        CONFIGURATION,
        valkey_config("noeviction", "allkeys-lru"),
        r"data\.valkey\.conf\.maxmemory-policy: expected noeviction, got allkeys-lru",
    ),
    "Valkey without a log": (
        CONFIGURATION,
        valkey_config("appendonly yes", "appendonly no"),
        r"data\.valkey\.conf\.appendonly: expected yes, got no",
    ),
    "Valkey without a password": (
        VALKEY,
        say([*VALKEY_CONTAINER, "args", 0], "requirepass", "# requirepass"),
        r"containers\[0\]\.args: expected requirepass from \$VALKEY_PASSWORD",
    ),
    "Valkey that forgets its data": (
        VALKEY,
        put(["spec", "volumeClaimTemplates"], REMOVED),
        r"spec\.volumeClaimTemplates: no claim is mounted at /data",
    ),
    "misspelt field of a built-in kind": (
        VALKEY,
        put(["spec", "replica"], 1),
        r"StatefulSet/flashray-valkey: spec: .*'replica' was unexpected",
    ),
    "wrong type in a built-in kind": (BUDGET, put(["spec", "minAvailable"], [1]), r"minAvailable"),
    "misspelt policy": (
        POLICY,
        put(["spec", "podSelectors"], {}),
        r"'podSelectors' was unexpected",
    ),
}
