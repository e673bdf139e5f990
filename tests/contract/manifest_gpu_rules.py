"""What the manifests of a GPU cluster must agree on: the engine with its workers, and the workers
with their nodes."""

from collections.abc import Iterator

from deployments.config import AppConfig
from tests.contract.kuberay import Cluster
from tests.contract.manifest import Document, quantity, worker_resources

GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"
CARD_GIB = {"NVIDIA-H200": 139}
NCCL_BYTES = 1 << 30  # of /dev/shm, beyond the object store


def gpu_groups(cluster: Cluster) -> Iterator[tuple[str, Document, Document]]:
    """Field, group and first container of every worker group that asks for GPUs."""
    for field, group in list(cluster.groups())[1:]:
        container = group["template"]["spec"]["containers"][0]
        if GPU in container.get("resources", {}).get("limits", {}):
            yield field, group, container


def gpu_engine_faults(cluster: Cluster, config: AppConfig, field: str) -> Iterator[str]:
    """The engine's settings, in `args` at `field`, against the GPUs that a worker has."""
    engine, groups = config.engine, [group for _, group, _ in gpu_groups(cluster)]
    if not engine.device.startswith("cuda"):
        if groups:
            message = f"{engine.device} leaves the GPUs of {len(groups)} worker groups idle"
            yield cluster.manifest.fault(f"{field}.engine.device", message)
        return
    num_gpus = max((int(worker_resources(group)["GPU"]) for group in groups), default=0)
    size = engine.tensor_parallel_size
    if size > num_gpus:
        message = f"expected at most the {num_gpus} GPUs of a worker, got {size}"
        yield cluster.manifest.fault(f"{field}.engine.tensor_parallel_size", message)
    elif num_gpus % size:
        message = f"{size} does not divide the {num_gpus} GPUs of a worker: {num_gpus % size} idle"
        yield cluster.manifest.fault(f"{field}.engine.tensor_parallel_size", message)
    if size > 1 and engine.num_gpus_per_rank != 1:
        message = f"expected 1, NCCL has no two ranks on a GPU: got {engine.num_gpus_per_rank}"
        yield cluster.manifest.fault(f"{field}.engine.gpus_per_rank", message)
    for group in groups:
        card_gib = CARD_GIB.get(group["template"]["spec"].get("nodeSelector", {}).get(PRODUCT))
        kv_cache_gib = engine.kv_cache_gib or 0.0
        if card_gib is not None and kv_cache_gib >= card_gib:
            message = f"expected less than the {card_gib} GiB of a card, got {kv_cache_gib}"
            yield cluster.manifest.fault(f"{field}.engine.kv_cache_gib", message)


def gpu_group_faults(cluster: Cluster) -> Iterator[str]:
    """GPUs go to workers on GPU nodes, whole, and Ray counts as many as the pod gets."""
    head = cluster.spec["headGroupSpec"]
    resources = head["template"]["spec"]["containers"][0].get("resources", {})
    for bound in ("requests", "limits"):
        if GPU in resources.get(bound, {}):
            place = f"headGroupSpec.template.spec.containers[0].resources.{bound}.{GPU}"
            yield cluster.fault(place, "the head runs no engine: GPUs go to the workers")
    for field, group, container in gpu_groups(cluster):
        pod, place = f"{field}.template.spec", f"{field}.template.spec.containers[0]"
        limit, resources = container["resources"]["limits"][GPU], container["resources"]
        if not str(limit).isdigit() or int(limit) < 1:
            message = f"expected a whole number, got {limit}"
            yield cluster.fault(f"{place}.resources.limits.{GPU}", message)
        if (wanted := resources.get("requests", {}).get(GPU, limit)) != limit:
            message = f"expected the {limit} of limits, got {wanted}"
            yield cluster.fault(f"{place}.resources.requests.{GPU}", message)
        stated = group.get("rayStartParams", {}).get("num-gpus", str(limit))
        if stated != str(limit):
            message = f"expected the pod's {limit}, got {stated}"
            yield cluster.fault(f"{field}.rayStartParams.num-gpus", message)
        spec = group["template"]["spec"]
        if GPU not in {toleration.get("key") for toleration in spec.get("tolerations", ())}:
            yield cluster.fault(f"{pod}.tolerations", f"expected one for the taint {GPU}")
        if PRODUCT not in spec.get("nodeSelector", {}):
            yield cluster.fault(f"{pod}.nodeSelector", f"expected {PRODUCT}: cards differ")
        if container["image"].endswith("-cpu"):
            yield cluster.fault(f"{place}.image", f"{container['image']} has no CUDA")


def rank_memory_faults(cluster: Cluster, config: AppConfig) -> Iterator[str]:
    """Ranks of one engine meet in /dev/shm, beside the object store."""
    if config.engine.tensor_parallel_size == 1:
        return
    for field, group, _ in gpu_groups(cluster):
        store_bytes = int(group.get("rayStartParams", {}).get("object-store-memory", 0))
        for position, volume in enumerate(group["template"]["spec"].get("volumes", ())):
            directory = volume.get("emptyDir", {})
            if directory.get("medium") != "Memory" or "sizeLimit" not in directory:
                continue
            if quantity(directory["sizeLimit"]) < store_bytes + NCCL_BYTES:
                yield cluster.fault(
                    f"{field}.template.spec.volumes[{position}].emptyDir.sizeLimit",
                    f"expected {NCCL_BYTES} bytes beyond the object store of {store_bytes}, "
                    f"got {directory['sizeLimit']}",
                )
