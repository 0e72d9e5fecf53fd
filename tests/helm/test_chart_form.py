"""The chart's form: Helm renders it, Kubernetes' schemas know every field of what comes out."""

from __future__ import annotations

import functools

import jsonschema
import kubernetes_validate
import pytest
from chart import NAMESPACE
from custom_resources import SCHEMAS
from value_sets import APART, REFUSED

VERSIONS = ("1.27", "1.32", "1.37")
"""Of Kubernetes: the oldest that Chart.yaml allows, one between, the newest whose schemas are at hand."""


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once():
    """The library reads megabytes of schema for each document."""
    utils = kubernetes_validate.utils
    read = utils.schema_contents
    utils.schema_contents = functools.cache(read)
    yield
    utils.schema_contents = read


def test_helm_lint_finds_nothing(helm):
    found = [each["error"] for each in helm[0]]
    assert found == ["icon is recommended"]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(rendered, version):
    assert len(rendered.documents) >= 8
    for document in rendered.documents:
        if document["kind"] not in SCHEMAS:
            kubernetes_validate.validate(document, version, strict=True)
            continue
        jsonschema.validate(document, SCHEMAS[document["kind"]])
        if document["kind"] == "LeaderWorkerSet":
            templates = document["spec"]["leaderWorkerTemplate"]
            for name in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": templates[name]}
                kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_do_refuse(helm, version):
    document = helm[1]["defaults"].of("Deployment")["baton-decode"]
    wrong = {**document, "spec": {**document["spec"], "replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("word", REFUSED)
def test_wrong_values_are_refused(helm, word):
    error = helm[1][f"refused {word}"].error
    assert "schema" in error and word in error


@pytest.mark.parametrize("text", APART)
def test_values_that_do_not_go_together_are_refused(helm, text):
    assert text in helm[1][f"refused {text}"].error


def test_names_are_labels_and_differ(rendered):
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered.documents]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)
    assert all(value and len(value) <= 63 for each in rendered.documents for value in labels(each).values())


def labels(document):
    return document["metadata"]["labels"]


def test_notes_name_what_is_there(rendered):
    gateway = next(name for name in rendered.of("Service") if name.endswith("-gateway"))
    assert f"{gateway}.{NAMESPACE}" in rendered.notes
    assert f"deploy/{gateway}" in rendered.notes and gateway in rendered.of("Deployment")
