"""What the chart starts, Baton takes: flags, variables, files, ports and times."""

from __future__ import annotations

import dataclasses

import click
import pytest
from chart import NAMESPACE, member
from processes import POD_IP, mounted, relocated, secret_of, settings, variables

from baton.authentication.cluster import ClusterAuthentication, ClusterCredentials, check_address
from baton.authentication.gateway import GatewayAuthentication
from baton.cli.config_fields import ROLES, fields_of
from baton.cli.health import health
from baton.discovery.dns import parse_name
from baton.worker.ranks.hosts import check_hosts

STOP_SECONDS = 15.0
"""After the drain a process may take 5 s of air and 10 s to stop (rpc/node.py)."""


def ports(container):
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def test_flags_ports_and_addresses(rendered, monkeypatch):
    roles = []
    for role, container in rendered.containers():
        config = settings(role, container, monkeypatch)
        assert ports(container) == {"grpc": config.port, "http": config.http_port}
        assert config.host == "0.0.0.0" and config.advertise == f"{POD_IP}:{config.port}"
        roles.append(role)
    assert {"gateway", "tokenizer", "decode"} <= set(roles)


def test_a_flag_that_no_process_has_is_seen(helm, monkeypatch):
    container = dict(helm[1]["defaults"].containers())["decode"]
    with pytest.raises(click.NoSuchOption, match="--kv-tokns"):
        settings("decode", {**container, "args": [*container["args"], "--kv-tokns=1"]}, monkeypatch)


def test_variables_are_options(rendered):
    for role, container in rendered.containers():
        own = [name for name in variables(container) if name.startswith("BATON_")]
        assert set(own) <= {field.variable for field in fields_of(ROLES[role]).values()}


def test_options_arrive(helm, monkeypatch):
    configs = {
        role: settings(role, container, monkeypatch) for role, container in helm[1]["everything"].containers()
    }
    gateway, prefill, decode = configs["gateway"], configs["prefill"], configs["decode"]
    assert (gateway.probe_every, gateway.max_requests, gateway.drain_seconds) == (60, 2_000_000, 600)
    assert (prefill.kv_tokens, prefill.overlap, prefill.transports) == (1_048_576, False, ("shm", "grpc"))
    assert (prefill.token_budget, prefill.eviction, prefill.drain_seconds) == (1024, "lru", 7.5)
    assert (decode.watermark, decode.eviction) == (0.05, "lfu")
    assert {config.model for role, config in configs.items() if role != "gateway"} == {"/models/mine"}
    assert {(config.log_level, config.log_format) for config in configs.values()} == {("debug", "text")}


def test_gpu_workers_choose_for_themselves(helm, monkeypatch):
    for role, container in helm[1]["gpu"].containers():
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert gpus == (1 if role in ("prefill", "decode") else 0)
        if gpus:
            config = settings(role, container, monkeypatch)
            assert config.device == "cuda"
            assert (config.transports, config.threads, config.kv_tokens) == ((), 0, 0)


def test_the_time_to_end_is_longer_than_the_drain(rendered, monkeypatch):
    for role, pod in rendered.pods().items():
        (container,) = pod["spec"]["containers"]
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {"command": ["sleep", "0"]})
        needed = float(sleep["command"][1]) + settings(role, container, monkeypatch).drain_seconds
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed + STOP_SECONDS
        assert ("lifecycle" in container) == (role == "gateway")


def test_strangers_are_kept_out_by_files_that_are_there(rendered, monkeypatch, tmp_path):
    """With the very files, at their modes, that the pod mounts; but for certificates, which are others'."""
    for role, pod in rendered.pods().items():
        (container,) = pod["spec"]["containers"]
        paths = mounted(rendered, pod, tmp_path)
        config = relocated(settings(role, container, monkeypatch), paths)
        assert config.cluster_secret_file
        if config.cluster_ca:
            assert config.cluster_cert and config.cluster_key and config.cluster_tls_name == "all.baton"
        certificates = [name for name in fields_of(type(config)) if name.endswith(("_cert", "_key", "_ca"))]
        assert config.cluster_secret_in_clear == (not config.cluster_ca)
        # Without the certificates, which are not at hand, as far as the secret is concerned.
        bare = dataclasses.replace(config, **dict.fromkeys(certificates, ""), cluster_secret_in_clear=True)
        guard = (
            GatewayAuthentication(bare)
            if role == "gateway"
            else ClusterAuthentication(ClusterCredentials.load(bare))
        )
        check_address(config.host, guard, config.insecure)
        assert config.insecure == (role == "gateway" and not config.api_keys)
        for path in tmp_path.glob("*/*"):
            path.chmod(0o600)
            path.unlink()


def test_all_processes_have_one_secret(rendered):
    volumes = [each for pod in rendered.pods().values() for each in pod["spec"]["volumes"]]
    names = {each["secret"]["secretName"] for each in volumes if each["name"] == "cluster"}
    assert len(names) == 1
    assert len(secret_of(rendered, names.pop())["secret"]) >= 32


def test_drawn_secrets_are_not_always_the_same(helm):
    drawn = [helm[1][name].of("Secret") for name in ("defaults", "gpu")]
    contents = [each["data"] for secrets in drawn for each in secrets.values()]
    assert len(contents) == 4 and len({str(each) for each in contents}) == 4
    assert not helm[1]["everything"].of("Secret")


def test_nodes_are_found_by_headless_services(rendered, monkeypatch):
    pods = rendered.pods()
    containers = dict(rendered.containers())
    gateway = settings("gateway", containers["gateway"], monkeypatch)
    for role in ("tokenizer", "decode", "prefill"):
        named = getattr(gateway, role)
        assert len(named) == (1 if role in pods else 0)
        if named:
            name = parse_name(named[0], role)
            service = rendered.of("Service")[name.host]
            assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
            assert name.port == settings(role, containers[role], monkeypatch).port
            assert service["spec"]["selector"]["app.kubernetes.io/component"] == role


def test_probes_ask_what_is_there(rendered, monkeypatch):
    """Workers with TLS between them are asked by `baton health`, gateways with TLS over HTTPS."""
    for role, container in rendered.containers():
        config = settings(role, container, monkeypatch)
        by_port = {value: name for name, value in ports(container).items()}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if "grpc" in probe:
                assert by_port[probe["grpc"]["port"]] == "grpc" and not config.cluster_ca
            elif "httpGet" in probe:
                assert probe["httpGet"]["port"] == "http" and probe["httpGet"]["path"] == "/health"
                assert probe["httpGet"]["scheme"] == ("HTTPS" if config.tls_cert else "HTTP")
                assert role == "gateway"
            elif "exec" in probe:
                baton, word, *arguments = probe["exec"]["command"]
                assert (baton, word) == ("baton", "health") and config.cluster_ca
                with health.make_context("health", arguments) as context:
                    assert context.params["address"] == f"127.0.0.1:{config.port}"
                    # Python's start took 10 s and more on busy cores.
                    assert context.params["seconds"] + 15 < probe["timeoutSeconds"]
            else:
                assert probe["tcpSocket"]["port"] in ports(container)
            # A gateway without decode nodes is not ready, and must not be restarted for that.
            assert ("tcpSocket" in probe) == (role == "gateway" and kind != "readinessProbe")


def test_a_model_has_the_time_to_load(helm):
    for name, seconds in (("defaults", 900), ("gpu", 1800)):
        for document in helm[1][name].of("Deployment").values():
            (container,) = document["spec"]["template"]["spec"]["containers"]
            probe = container["startupProbe"]
            allowed = probe["failureThreshold"] * probe["periodSeconds"]
            assert allowed == {"gateway": 120, "tokenizer": 300}.get(container["name"], seconds)
            # All roles: gateways are not ready before decode nodes are.
            assert document["spec"]["progressDeadlineSeconds"] > seconds


def test_all_pods_of_a_group_start_one_worker(helm, monkeypatch):
    rendered = helm[1]["ranks"]
    (group,) = rendered.of("LeaderWorkerSet").values()
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    configs = []
    for index in range(size):
        template = member(group, "workerTemplate" if index else "leaderTemplate", index)
        (container,) = template["spec"]["containers"]
        config = settings("decode", container, monkeypatch)
        configs.append(dataclasses.replace(config, node_rank=0))
        assert config.node_rank == index
        assert sorted(name for name in container if name.endswith("Probe")) == (
            [] if index else ["livenessProbe", "readinessProbe", "startupProbe"]
        )
        assert "ports" not in container or not index
    assert configs[0] == configs[1] and len(configs) == size == 2
    assert (configs[0].nnodes, configs[0].tp) == (2, 4)
    assert configs[0].master == f"baton-decode-0.baton-decode.{NAMESPACE}:29500"
    monkeypatch.setattr("baton.worker.ranks.hosts.is_loopback", lambda host: False)
    check_hosts(dataclasses.replace(configs[0], cluster_secret_file="", insecure=True))


def test_ranks_have_room_for_the_pool_that_they_share(helm):
    for role, pod in helm[1]["ranks"].pods().items():
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        mounts = [each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]]
        assert ("/dev/shm" in mounts) == (role in ("prefill", "decode"))
        if role in ("prefill", "decode"):
            assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"}
