"""Kubernetes manifests as a kustomization lists them, and how faults in them are worded."""

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tests.contract.manifest_patch import apply, below

ROOT = Path(__file__).parents[2]
BASE = ROOT / "k8s" / "base"
OVERLAYS = ROOT / "k8s" / "overlays"
KUSTOMIZATION_FIELDS = {"apiVersion", "kind", "namespace", "resources", "images", "patches"}
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`file` wrote the document; `patched` says which fields other files have written since."""

    file: str
    document: Document
    patched: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.document.get("kind"))

    @property
    def name(self) -> str:
        return str(self.document.get("metadata", {}).get("name"))

    def fault(self, field: str, message: str) -> str:
        return f"{self.file_of(field)}: {self.kind}/{self.name}: {field}: {message}"

    def file_of(self, field: str) -> str:
        """The file that last wrote the field, or what it is in, or else something in it."""
        above = [file for path, file in self.patched.items() if contains(path, field)]
        inside = [file for path, file in self.patched.items() if contains(field, path)]
        return [self.file, *inside, *above][-1]


def contains(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def file_name(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def load(file: Path) -> list[Manifest]:
    """Through JSON, as kustomize does: what an alias repeats is patched in one place alone."""
    documents = yaml.safe_load_all(file.read_text())
    return [Manifest(file_name(file), json.loads(json.dumps(each))) for each in documents if each]


def render(folder: Path = BASE) -> list[Manifest]:
    """What `kubectl kustomize` makes of the fields that our kustomizations use."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = kustomization.keys() - KUSTOMIZATION_FIELDS
    assert not unknown, f"render does not know {unknown}: extend it"
    manifests: list[Manifest] = []
    for resource in kustomization["resources"]:
        source = folder / resource
        manifests += render(source) if source.is_dir() else load(source)
    for patch in kustomization.get("patches", ()):
        manifests = patched(manifests, patch["target"], folder / patch["path"])
    images = {image["name"]: image for image in kustomization.get("images", ())}
    for manifest in manifests:
        manifest.document["metadata"]["namespace"] = kustomization["namespace"]
        for _, container in containers(manifest.document):
            name, _, tag = container["image"].partition(":")
            if image := images.get(name):
                tag = image.get("newTag", tag)
                container["image"] = f"{image.get('newName', name)}:{tag}"
    return manifests


def patched(manifests: list[Manifest], target: Document, file: Path) -> list[Manifest]:
    """The manifests with the JSON patch (RFC 6902) in `file` applied to the one it targets."""
    operations = yaml.safe_load(file.read_text())
    hits = [m for m in manifests if {"kind": m.kind, "name": m.name} == target]
    if len(hits) != 1:
        raise ValueError(f"{file_name(file)}: expected one resource {target}, found {len(hits)}")
    document, written = copy.deepcopy(hits[0].document), dict(hits[0].patched)
    for operation in operations:
        try:
            path = apply(document, operation)
        except (KeyError, IndexError, ValueError, TypeError) as exc:
            place = f"{file_name(file)}: {target['kind']}/{target['name']}: {operation['path']}"
            raise ValueError(f"{place}: cannot {operation['op']}: {exc!r}") from exc
        written.pop(path, None)  # the last writer stands last
        written[path] = file_name(file)
    changed = replace(hits[0], document=document, patched=written)
    return [changed if manifest is hits[0] else manifest for manifest in manifests]


def quantity(value: str | int) -> float:
    """A Kubernetes quantity as a number: bytes, or cores."""
    match = re.fullmatch(r"([\d.]+)(Ki|Mi|Gi|Ti|m)?", str(value))
    assert match is not None, f"{value!r} is not a quantity that the manifests use"
    unit = match[2]
    return float(match[1]) * (UNITS.get(unit, 1e-3) if unit else 1)


def worker_resources(group: Document) -> dict[str, float]:
    """What Ray believes one worker of the group has."""
    limits = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    parameters = group.get("rayStartParams", {})
    return {
        "CPU": float(parameters.get("num-cpus", math.ceil(quantity(limits.get("cpu", 0))))),
        "GPU": float(parameters.get("num-gpus", quantity(limits.get("nvidia.com/gpu", 0)))),
        "memory": quantity(limits.get("memory", 0)),
    }


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every mapping, list and scalar below `node`, each with its path."""
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, below(path, str(key)))
    elif isinstance(node, list):
        for position, value in enumerate(node):
            yield from walk(value, below(path, position))


def pod_specs(document: Document) -> Iterator[tuple[str, Document]]:
    for path, node in walk(document):
        if isinstance(node, dict) and isinstance(node.get("containers"), list):
            yield path, node


def containers(document: Document) -> Iterator[tuple[str, Document]]:
    for path, spec in pod_specs(document):
        for kind in ("initContainers", "containers"):
            for position, container in enumerate(spec.get(kind, ())):
                yield f"{path}.{kind}[{position}]", container
