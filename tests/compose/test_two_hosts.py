"""deploy/compose: the files for two machines are valid, and what they start finds each other; not started."""

from __future__ import annotations

import os

import pytest
import yaml
from engine import compose_command, run

from baton.cli.config_fields import ROLES, build
from baton.cli.serve import serve

HOSTS = {"BATON_HOST_A": "10.0.0.1", "BATON_HOST_B": "10.0.0.2"}


@pytest.fixture(scope="module")
def machines():
    """Machine -> its services, as compose understands the files."""
    files = {"a": "deploy/compose/host-a.yaml", "b": "deploy/compose/host-b.yaml"}
    command = compose_command()
    return {
        machine: yaml.safe_load(run([*command, "-f", file, "config"], **HOSTS))["services"]
        for machine, file in files.items()
    }


def services(machines):
    return [(machine, role, one) for machine, found in machines.items() for role, one in found.items()]


def settings(role, service, monkeypatch):
    """As Baton understands the container's variables, the image's among them."""
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    variables = {"BATON_HOST": "0.0.0.0", **service["environment"]}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    baton, word, said, *flags = service["command"]
    assert (baton, word, said) == ("baton", "serve", role)
    with serve.commands[role].make_context(role, flags) as context:
        return build(ROLES[role], context.params, {})


def published(service):
    """Port of the container -> address and port of the machine; both forms in which compose tells them."""
    found = {}
    for port in service.get("ports", []):
        if isinstance(port, str):
            address, outside, inside = port.removesuffix("/tcp").split(":")
        else:
            address, outside, inside = port["host_ip"], port["published"], port["target"]
        found[int(inside)] = f"{address}:{outside}"
    return found


def test_roles(machines):
    assert {machine: set(found) for machine, found in machines.items()} == {
        "a": {"gateway", "tokenizer", "prefill", "decode"},
        "b": {"prefill", "decode"},
    }


def test_the_gateways_lists_are_where_the_workers_are(machines, monkeypatch):
    gateway = settings("gateway", machines["a"]["gateway"], monkeypatch)
    for role, port in (("prefill", 50061), ("decode", 50071)):
        there = {
            settings(role, service, monkeypatch).advertise: published(service)
            for _, name, service in services(machines)
            if name == role
        }
        assert set(getattr(gateway, role)) == set(there) == {f"{host}:{port}" for host in HOSTS.values()}
        assert all(ports == {port: address} for address, ports in there.items())
    assert gateway.tokenizer == ("tokenizer:50051",)


def test_only_gateway_and_workers_are_published_and_all_know_the_secret(machines, monkeypatch):
    for machine, role, service in services(machines):
        config = settings(role, service, monkeypatch)
        assert not config.insecure
        mounts = [each.split(":") for each in service["volumes"] if isinstance(each, str)]
        mounts += [[each["source"], each["target"]] for each in service["volumes"] if isinstance(each, dict)]
        targets = {target: source for source, target, *_ in mounts}
        assert targets[config.cluster_secret_file].endswith("/cluster-secret")
        if role == "gateway":
            assert targets[config.api_keys].endswith("/api-keys")
            assert all(address.startswith("127.0.0.1:") for address in published(service).values())
        if role == "tokenizer":
            assert not published(service)
        assert service["read_only"] and service["cap_drop"] == ["ALL"], machine
