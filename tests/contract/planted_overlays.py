"""Faults to plant in the rendered overlays. The expected line starts with the file that wrote the
field: the overlay's own where it patches it, the base's where it does not."""

from tests.contract.planted import (
    BUDGET,
    CLUSTER,
    HEAD,
    HEAD_CONTAINER,
    HEAD_POD,
    REMOVED,
    SERVICE,
    VALKEY,
    WORKER_POD,
    Fault,
    Place,
    all_of,
    put,
    serve_config,
)

CLAIM = "PersistentVolumeClaim"
GPU_WORKER: Place = [*CLUSTER, "workerGroupSpecs", 1]
GPU_POD: Place = [*GPU_WORKER, "template", "spec"]
GPU_CONTAINER: Place = [*GPU_POD, "containers", 0]
GPU_LIMITS: Place = [*GPU_CONTAINER, "resources", "limits"]
GPU_REQUESTS: Place = [*GPU_CONTAINER, "resources", "requests"]
GPU = "nvidia.com/gpu"
H200 = "h200/rayservice.yaml"
DEMO = "cpu-demo/rayservice.yaml"


def gpus(count: object) -> Fault:
    return all_of(put([*GPU_LIMITS, GPU], count), put([*GPU_REQUESTS, GPU], count))


PLANTED_OVERLAYS: dict[str, tuple[str, str, Fault, str]] = {
    "misspelt field": (
        H200,
        SERVICE,
        all_of(
            put([*GPU_POD, "toleration"], []),
            put([*GPU_POD, "tolerations"], REMOVED),
        ),
        r"workerGroupSpecs\[1\]\.template\.spec: .*'toleration' was unexpected",
    ),
    "misspelt field of a claim": (
        "h200/data-claim.yaml",
        CLAIM,
        put(["spec", "accessMode"], ["ReadWriteMany"]),
        r"spec: .*'accessMode' was unexpected",
    ),
    "misspelt argument": (
        H200,
        SERVICE,
        serve_config("tensor_parallel_size: 2", "tensor_parallel: 2"),
        r"applications\[0\]\.args\.engine\.tensor_parallel: Extra inputs",
    ),
    "wrong type": (
        H200,
        SERVICE,
        put([*GPU_WORKER, "replicas"], "one"),
        r"workerGroupSpecs\[1\]\.replicas: 'one' is not of type 'integer'",
    ),
    "wrong type of a selector": (
        H200,
        SERVICE,
        put([*GPU_POD, "nodeSelector"], ["NVIDIA-H200"]),
        r"workerGroupSpecs\[1\]\.template\.spec\.nodeSelector: .* is not of type 'object'",
    ),
    "wrong type of an argument": (
        H200,
        SERVICE,
        serve_config("tensor_parallel_size: 2", "tensor_parallel_size: two"),
        r"args\.engine\.tensor_parallel_size: Input should be a valid integer",
    ),
    "wrong type of a budget": (
        "h200/poddisruptionbudget.yaml",
        BUDGET,
        put(["spec", "minAvailable"], [2]),
        r"spec\.minAvailable: ",
    ),
    "TP larger than the GPUs of a worker": (
        H200,
        SERVICE,
        serve_config("tensor_parallel_size: 2", "tensor_parallel_size: 4"),
        r"args\.engine\.tensor_parallel_size: expected at most the 2 GPUs of a worker, got 4",
    ),
    "worker with fewer GPUs than TP": (
        H200,
        SERVICE,
        gpus(1),
        r"args\.engine\.tensor_parallel_size: expected at most the 1 GPUs of a worker, got 2",
    ),
    "TP that leaves a GPU idle": (
        H200,
        SERVICE,
        gpus(3),
        r"args\.engine\.tensor_parallel_size: 2 does not divide the 3 GPUs of a worker: 1 idle",
    ),
    "two ranks on a GPU": (
        H200,
        SERVICE,
        serve_config("device: cuda", "device: cuda\n        gpus_per_rank: 0.5"),
        r"args\.engine\.gpus_per_rank: expected 1, .*: got 0\.5",
    ),
    "missing secret": (
        H200,
        SERVICE,
        put([*GPU_POD, "volumes", 1, "secret", "secretName"], "flashray-gpu-keys"),
        r"workerGroupSpecs\[1\].*volumes\[1\]\.secret: .* no flashray-gpu-keys/api-keys",
    ),
    "missing secret of a variable": (
        H200,
        SERVICE,
        put(
            [*GPU_CONTAINER, "env", 1, "valueFrom", "secretKeyRef", "name"],
            "valkey",
        ),
        r"workerGroupSpecs\[1\].*env\[1\]\.valueFrom\.secretKeyRef: .* no valkey/password",
    ),
    "missing secret of the environment": (
        H200,
        SERVICE,
        put([*GPU_CONTAINER, "envFrom"], [{"secretRef": {"name": "proxy-keys"}}]),
        r"workerGroupSpecs\[1\].*envFrom\[0\]\.secretRef: .* documents no proxy-keys",
    ),
    "missing secret of the registry": (
        "base/rayservice.yaml",
        SERVICE,
        put([*WORKER_POD, "imagePullSecrets"], [{"name": "registry"}]),
        r"workerGroupSpecs\[0\]\.template\.spec\.imagePullSecrets\[0\]: .* documents no registry",
    ),
    "secret in clear text": (
        H200,
        SERVICE,
        put([*GPU_CONTAINER, "env", 6], {"name": "HF_TOKEN", "value": "hf_0123"}),
        r"workerGroupSpecs\[1\].*env\[6\]\.value: HF_TOKEN in clear text",
    ),
    "GPU on the head": (
        H200,
        SERVICE,
        put([*HEAD_CONTAINER, "resources", "limits", GPU], 1),
        r"headGroupSpec.*resources\.limits\.nvidia\.com/gpu: the head runs no engine",
    ),
    "requests of other GPUs than limits": (
        H200,
        SERVICE,
        put([*GPU_REQUESTS, GPU], 1),
        r"resources\.requests\.nvidia\.com/gpu: expected the 2 of limits, got 1",
    ),
    "half a GPU": (
        H200,
        SERVICE,
        gpus("500m"),
        r"resources\.limits\.nvidia\.com/gpu: expected a whole number, got 500m",
    ),
    "Ray that counts other GPUs": (
        H200,
        SERVICE,
        put([*GPU_WORKER, "rayStartParams", "num-gpus"], "8"),
        r"workerGroupSpecs\[1\]\.rayStartParams\.num-gpus: expected the pod's 2, got 8",
    ),
    "no toleration": (
        H200,
        SERVICE,
        put([*GPU_POD, "tolerations"], REMOVED),
        r"workerGroupSpecs\[1\]\.template\.spec\.tolerations: expected one for the taint",
    ),
    "no node selector": (
        H200,
        SERVICE,
        put([*GPU_POD, "nodeSelector"], REMOVED),
        r"workerGroupSpecs\[1\]\.template\.spec\.nodeSelector: expected nvidia\.com/gpu\.product",
    ),
    "image without CUDA": (
        H200,
        SERVICE,
        put([*GPU_CONTAINER, "image"], "registry.example.com/flashray:0.1.0-cpu"),
        r"workerGroupSpecs\[1\].*containers\[0\]\.image: .*:0\.1\.0-cpu has no CUDA",
    ),
    "engine on the CPU of GPU workers": (
        H200,
        SERVICE,
        serve_config("device: cuda\n        tensor_parallel_size: 2", "device: cpu"),
        r"args\.engine\.device: cpu leaves the GPUs of 1 worker groups idle",
    ),
    "cache larger than the card": (
        H200,
        SERVICE,
        serve_config("kv_cache_gib: 56.0", "kv_cache_gib: 141.0"),
        r"args\.engine\.kv_cache_gib: expected less than the 139 GiB of a card, got 141\.0",
    ),
    "bundles larger than a worker": (
        H200,
        SERVICE,
        all_of(put([*GPU_LIMITS, "cpu"], "2"), put([*GPU_REQUESTS, "cpu"], "2")),
        r"workerGroupSpecs: no worker has .*'CPU': 2\.1, 'GPU': 2.* for a replica of FlashEngine",
    ),
    "object store larger than shared memory": (
        H200,
        SERVICE,
        put([*GPU_WORKER, "rayStartParams", "object-store-memory"], "34359738368"),
        r"workerGroupSpecs\[1\]\.rayStartParams\.object-store-memory: expected 1 to the 24Gi",
    ),
    "no shared memory for NCCL": (
        H200,
        SERVICE,
        put([*GPU_POD, "volumes", 0, "emptyDir", "sizeLimit"], "16Gi"),
        r"workerGroupSpecs\[1\].*volumes\[0\]\.emptyDir\.sizeLimit: expected 1073741824 bytes",
    ),
    "shared memory over the pod's limit": (
        H200,
        SERVICE,
        put([*GPU_POD, "volumes", 0, "emptyDir", "sizeLimit"], "200Gi"),
        r"workerGroupSpecs\[1\].*emptyDir\.sizeLimit: 200Gi counts against the pod's memory limit",
    ),
    "model outside the volume": (
        H200,
        SERVICE,
        serve_config("/var/lib/flashray/models/llama", "/models/llama"),
        r"args\.model: /models/llama\S* is on no claim that headGroupSpec mounts",
    ),
    "volume that the GPU workers do not mount": (
        H200,
        SERVICE,
        put([*GPU_CONTAINER, "volumeMounts", 2, "mountPath"], "/mnt"),
        r"args\.model: .* is on no claim that workerGroupSpecs\[1\] mounts: \['/mnt'\]",
    ),
    "converted models on the pod's own disk": (
        H200,
        SERVICE,
        put([*HEAD_CONTAINER, "env", 6, "value"], "/tmp/cache"),
        r"headGroupSpec.*env\[6\]\.value: expected a folder on a claim, \['/var/lib/flashray'\]",
    ),
    "no folder for converted models": (
        H200,
        SERVICE,
        put([*GPU_CONTAINER, "env", 6], REMOVED),
        r"workerGroupSpecs\[1\].*containers\[0\]\.env: expected FLASHRAY_CACHE, on a claim",
    ),
    "audit on the pod's own disk": (
        H200,
        SERVICE,
        serve_config("folder: /var/lib/flashray/audit", "folder: /var/log/flashray"),
        r"args\.audit\.folder: /var/log/flashray is on no claim",
    ),
    "claim that is not there": (
        H200,
        SERVICE,
        put([*HEAD_POD, "volumes", 2, "persistentVolumeClaim", "claimName"], "models"),
        r"headGroupSpec.*volumes\[2\]\.persistentVolumeClaim\.claimName: .*\['flashray-data'\]",
    ),
    "claim for one node": (
        "h200/data-claim.yaml",
        CLAIM,
        put(["spec", "accessModes"], ["ReadWriteOnce"]),
        r"spec\.accessModes: expected ReadWriteMany",
    ),
    "drain that is never allowed": (
        "h200/poddisruptionbudget.yaml",
        BUDGET,
        put(["spec", "minAvailable"], 3),
        r"spec\.minAvailable: expected less than the 3 workers, got 3",
    ),
    "drain of the demo that is never allowed": (
        "cpu-demo/poddisruptionbudget.yaml",
        BUDGET,
        put(["spec", "minAvailable"], 1),
        r"spec\.minAvailable: expected less than the 1 workers, got 1",
    ),
    "demo without a worker": (
        DEMO,
        SERVICE,
        put([*CLUSTER, "workerGroupSpecs", 0, "minReplicas"], 0),
        r"workerGroupSpecs: expected minReplicas of 1 or more in all",
    ),
    "demo with more than its worker": (
        DEMO,
        SERVICE,
        serve_config("num_replicas: 1", "num_replicas: 12"),
        r"workerGroupSpecs: the app asks for .*'CPU': 2\.",
    ),
    "demo's shared memory over the head's limit": (
        DEMO,
        SERVICE,
        put([*HEAD_POD, "volumes", 0, "emptyDir", "sizeLimit"], "1536Mi"),
        r"headGroupSpec.*emptyDir\.sizeLimit: 1536Mi counts against the pod's memory limit",
    ),
    "misspelt quantity of the demo": (
        "cpu-demo/valkey.yaml",
        VALKEY,
        put(
            ["spec", "volumeClaimTemplates", 0, "spec", "resources", "requests", "storage"],
            [1],
        ),
        r"spec\.volumeClaimTemplates\[0\]\.spec\.resources\.requests\.storage: ",
    ),
    "field of the base": (
        "base/rayservice.yaml",
        SERVICE,
        put([*HEAD, "rayStartParams", "num-cpus"], "2"),
        r"headGroupSpec\.rayStartParams\.num-cpus: expected \"0\", got '2'",
    ),
}
