"""The chart of this repository, rendered, and its documents looked at."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/baton"
NAMESPACE = "models"
Document = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """`error`: why Helm refused; empty: it did not."""

    release: str
    documents: list[Document]
    text: str
    """Of which they were read."""
    notes: str
    error: str

    def of(self, kind: str) -> dict[str, Document]:
        """Documents by name."""
        return {each["metadata"]["name"]: each for each in self.documents if each["kind"] == kind}

    def pods(self) -> dict[str, Document]:
        """Role -> the template of the pods that serve, as its controller labels them."""
        found = {}
        for document in self.workloads().values():
            template = served_by(document)
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
        return found

    def workloads(self) -> dict[str, Document]:
        """What makes pods, by name."""
        return self.of("Deployment") | self.of("LeaderWorkerSet")

    def containers(self) -> Iterator[tuple[str, Document]]:
        for role, pod in self.pods().items():
            (container,) = pod["spec"]["containers"]
            yield role, container


def served_by(workload: Document) -> Document:
    if workload["kind"] == "Deployment":
        template: Document = workload["spec"]["template"]
        return template
    return member(workload, "leaderTemplate", 0)


def member(workload: Document, which: str, index: int) -> Document:
    """A pod template of a LeaderWorkerSet, with the label and the variables that its controller adds."""
    template: Document = copy.deepcopy(workload["spec"]["leaderWorkerTemplate"][which])
    template["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = str(index)
    for container in template["spec"]["containers"]:
        address = f"{workload['metadata']['name']}-0.{workload['metadata']['name']}.{NAMESPACE}"
        added = {"LWS_LEADER_ADDRESS": address, "LWS_WORKER_INDEX": str(index)}
        container["env"] += [{"name": name, "value": value} for name, value in added.items()]
    return template


def ask_helm(jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[Document], list[Rendered]]:
    """Findings of `helm lint`, and the chart rendered for each release name and values."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk is not installed: it is for x86-64 Linux only")
    asked = {
        "chart": str(CHART),
        "renders": [{"name": name, "namespace": NAMESPACE, "values": dict(values)} for name, values in jobs],
    }
    child = Path(__file__).with_name("helm_child.py")
    done = subprocess.run(
        [sys.executable, str(child)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    renders = zip(jobs, answer["renders"], strict=True)
    return answer["lint"], [_rendered(name, each) for (name, _), each in renders]


def _rendered(release: str, answer: Mapping[str, Any]) -> Rendered:
    texts: list[str] = []
    notes = ""
    for path, text in answer.get("files", {}).items():
        if path.endswith("NOTES.txt"):
            notes = text
        else:
            texts.append(text)
    whole = "\n---\n".join(texts)
    documents = [each for each in yaml.load_all(whole, UniqueKeys) if each]
    return Rendered(release, documents, whole, notes, answer.get("error", ""))


class UniqueKeys(yaml.SafeLoader):
    """A key that comes twice is an error, as it is to Kubernetes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key comes twice among {keys}: {node.start_mark}"
        return super().construct_mapping(node, deep)


def selects(selector: Mapping[str, str], pod: Document) -> bool:
    """Whether matchLabels (or a Service's selector) choose the pod. An empty selector is none of ours."""
    assert selector
    return selector.items() <= pod["metadata"]["labels"].items()
