"""Kubernetes manifests as a kustomization lists them, and how faults in them are worded."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BASE = ROOT / "k8s" / "base"

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    file: str
    document: Document

    @property
    def kind(self) -> str:
        return str(self.document.get("kind"))

    @property
    def name(self) -> str:
        return str(self.document.get("metadata", {}).get("name"))

    def fault(self, field: str, message: str) -> str:
        return f"{self.file}: {self.kind}/{self.name}: {field}: {message}"


def load(file: Path) -> list[Manifest]:
    documents = yaml.safe_load_all(file.read_text())
    return [Manifest(file.name, document) for document in documents if document]


def render(folder: Path = BASE) -> list[Manifest]:
    """What `kubectl kustomize` makes of the three fields that our base uses."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = kustomization.keys() - {"apiVersion", "kind", "namespace", "resources", "images"}
    assert not unknown, f"render does not know {unknown}: extend it"
    images = {image["name"]: image for image in kustomization.get("images", ())}
    manifests: list[Manifest] = []
    for resource in kustomization["resources"]:
        for manifest in load(folder / resource):
            document = copy.deepcopy(manifest.document)
            document["metadata"]["namespace"] = kustomization["namespace"]
            for _, container in containers(document):
                if image := images.get(container["image"]):
                    container["image"] = f"{image['newName']}:{image['newTag']}"
            manifests.append(Manifest(manifest.file, document))
    return manifests


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every mapping, list and scalar below `node`, each with its path."""
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for position, value in enumerate(node):
            yield from walk(value, f"{path}[{position}]")


def pod_specs(document: Document) -> Iterator[tuple[str, Document]]:
    for path, node in walk(document):
        if isinstance(node, dict) and isinstance(node.get("containers"), list):
            yield path, node


def containers(document: Document) -> Iterator[tuple[str, Document]]:
    for path, spec in pod_specs(document):
        for field in ("initContainers", "containers"):
            for position, container in enumerate(spec.get(field, ())):
                yield f"{path}.{field}[{position}]", container
