"""kubectl reads what the chart makes, as far as it does so without a cluster. `apply --dry-run=client` asks
one which kinds it has; `label --local` and `set env --local` stay on the client."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml

KUBECTL = shutil.which("kubectl")
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")]


def kubectl(tmp_path, text: str, *command: str) -> list[dict]:
    """What it writes for these documents, of which it has read each."""
    path = tmp_path / "all.yaml"
    path.write_text(text)
    done = subprocess.run(
        [KUBECTL, *command, "--local", "-f", str(path), "-o", "json"],
        env={"HOME": str(tmp_path), "KUBECONFIG": "/dev/null"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:].strip()
    return found


def test_it_reads_every_document_as_it_is_meant(rendered, tmp_path):
    read = kubectl(tmp_path, rendered.text, "label", "read=yes")
    for document in read:
        assert document["metadata"]["labels"].pop("read") == "yes"
    assert read == rendered.documents


def test_it_knows_the_types_of_deployments(rendered, tmp_path):
    deployments = [each for each in rendered.documents if each["kind"] == "Deployment"]
    read = kubectl(tmp_path, yaml.safe_dump_all(deployments), "set", "env", "ADDED=1")
    containers = [each["spec"]["template"]["spec"]["containers"][0] for each in read]
    assert all({"name": "ADDED", "value": "1"} in container["env"] for container in containers)
    assert len(read) == len(deployments)


def test_it_refuses_a_wrong_type(helm, tmp_path):
    document = helm[1]["defaults"].of("Deployment")["baton-decode"]
    wrong = {**document, "spec": {**document["spec"], "replicas": "two"}}
    with pytest.raises(AssertionError, match="unable to decode"):
        kubectl(tmp_path, yaml.safe_dump(wrong), "set", "env", "ADDED=1")
