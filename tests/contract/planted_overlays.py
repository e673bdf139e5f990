"""Faults to plant in the rendered overlays. The expected line starts with the file that wrote the
field: the overlay's own where it patches it, the base's where it does not."""

from tests.contract.planted import (
    BUDGET,
    CLUSTER,
    HEAD,
    HEAD_POD,
    SERVICE,
    VALKEY,
    WORKER_POD,
    Fault,
    put,
    serve_config,
)

DEMO = "cpu-demo/rayservice.yaml"


PLANTED_OVERLAYS: dict[str, tuple[str, str, Fault, str]] = {
    "missing secret of the registry": (
        "base/rayservice.yaml",
        SERVICE,
        put([*WORKER_POD, "imagePullSecrets"], [{"name": "registry"}]),
        r"workerGroupSpecs\[0\]\.template\.spec\.imagePullSecrets\[0\]: .* documents no registry",
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
