"""How the chart's documents fit each other: selectors, ports, volumes, policies, autoscaling."""

from __future__ import annotations

import pytest
from chart import NAMESPACE, ROOT, member, selects
from prometheus_client import CollectorRegistry

from baton.rpc.metrics import LoadCollector
from baton.v1 import node_pb2

CALLS = {
    ("gateway", "tokenizer"),
    ("gateway", "decode"),
    ("decode", "prefill"),
    ("prefill", "encode"),
    ("decode", "encode"),
    ("gateway", "prefill"),
    ("gateway", "encode"),
}
"""Who connects to whom. The last two: `baton status` in a gateway's pod."""


def roles_chosen(rendered, selector):
    return [role for role, pod in rendered.pods().items() if selects(selector, pod)]


def test_selectors_choose_one_role(rendered):
    for kind, where in (("Deployment", "selector"), ("PodDisruptionBudget", "selector")):
        for name, document in rendered.of(kind).items():
            (role,) = roles_chosen(rendered, document["spec"][where]["matchLabels"])
            assert name.endswith(f"-{role}")
    for name, document in rendered.of("Service").items():
        (role,) = roles_chosen(rendered, document["spec"]["selector"])
        assert name.endswith(f"-{role}")
        named = {each["name"]: each["containerPort"] for each in dict(rendered.containers())[role]["ports"]}
        for port in document["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]


def test_selectors_leave_other_releases_alone(helm):
    selector = helm[1]["defaults"].of("Deployment")["baton-decode"]["spec"]["selector"]["matchLabels"]
    assert not roles_chosen(helm[1]["gpu"], selector)


def test_a_budget_for_each_role_allows_evictions(helm, rendered):
    budgets = rendered.of("PodDisruptionBudget")
    without = {"prefill", "decode"} if rendered is helm[1]["open"] else set()
    roles = [*rendered.pods().keys() - without]
    assert budgets.keys() == {name for name in rendered.workloads() if name.rpartition("-")[2] in roles}
    for name, budget in budgets.items():
        special = rendered is helm[1]["everything"] and name.endswith("-decode")
        assert budget["spec"]["maxUnavailable"] == ("50%" if special else 1)


def test_only_the_gateway_is_open_and_only_callers_reach_nodes(helm, rendered):
    policies = rendered.of("NetworkPolicy")
    if rendered is helm[1]["open"]:
        assert not policies
        return
    pods = rendered.pods()
    open_to = {}
    for policy in policies.values():
        (role,) = roles_chosen(rendered, policy["spec"]["podSelector"]["matchLabels"])
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        open_to[role] = policy["spec"]["ingress"]
    assert open_to.keys() == pods.keys()
    clients, pictures = open_to.pop("gateway")
    assert [port["port"] for port in clients["ports"]] == ["grpc", "http"]
    args = pods["gateway"]["spec"]["containers"][0]["args"]
    assert [f"--pictures-port={port['port']}" for port in pictures["ports"]] == [
        each for each in args if each.startswith("--pictures-port=")
    ]
    fetching = {
        role
        for peer in pictures["from"]
        for role in roles_chosen(rendered, peer["podSelector"]["matchLabels"])
    }
    assert fetching == {"prefill", "decode", "encode"} & pods.keys()
    calls = set()
    for role, rules in open_to.items():
        grpc, *metrics = rules
        if rendered is helm[1]["ranks"] and role == "decode":
            among, *metrics = metrics
            assert among.keys() == {"from"}
            assert roles_chosen(rendered, among["from"][0]["podSelector"]["matchLabels"]) == [role]
        assert [port["port"] for port in grpc["ports"]] == ["grpc"]
        for peer in grpc["from"]:
            calls |= {(caller, role) for caller in roles_chosen(rendered, peer["podSelector"]["matchLabels"])}
        assert all(rule["from"] and [p["port"] for p in rule["ports"]] == ["http"] for rule in metrics)
        assert len(metrics) == (1 if rendered in (helm[1]["everything"], helm[1]["ranks"]) else 0)
    assert calls == {(caller, role) for caller, role in CALLS if role in pods}


def test_gateways_clients_can_be_named(helm):
    def clients(name):
        (policy,) = [p for n, p in helm[1][name].of("NetworkPolicy").items() if n.endswith("-gateway")]
        return policy["spec"]["ingress"][0].get("from", "everybody")

    assert clients("defaults") == "everybody"
    assert clients("everything") == [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]


def test_replicas_are_the_autoscalers_where_there_is_one(rendered):
    scaled = {
        each["spec"]["scaleTargetRef"]["name"]: each
        for each in (rendered.of("HorizontalPodAutoscaler") | rendered.of("ScaledObject")).values()
    }
    for name, document in rendered.workloads().items():
        assert ("replicas" in document["spec"]) == (name not in scaled)
        if name in scaled:
            target = scaled[name]["spec"]["scaleTargetRef"]
            assert (target["apiVersion"], target["kind"]) == (document["apiVersion"], document["kind"])
    assert scaled.keys() <= rendered.workloads().keys()


def test_autoscaling_goes_by_metrics_that_workers_have(helm):
    found = helm[1]["everything"].of("HorizontalPodAutoscaler")
    metrics = {
        name: [each["pods"]["metric"]["name"] for each in document["spec"]["metrics"]]
        for name, document in found.items()
    }
    assert metrics == {
        "baton-prefill": ["baton_waiting"],
        "baton-decode": ["baton_kv_usage", "baton_wait_seconds"],
    }
    exposed = CollectorRegistry()
    exposed.register(LoadCollector(lambda: "decode", node_pb2.Load, node_pb2.NodeInfo))
    names = {family.name for family in exposed.collect()}
    assert names > {name for some in metrics.values() for name in some}
    assert found["baton-prefill"]["spec"]["maxReplicas"] == 3
    assert not helm[1]["defaults"].of("HorizontalPodAutoscaler")


def test_keda_asks_prometheus_for_the_same_metrics(helm):
    rendered = helm[1]["pool"]
    assert not rendered.of("HorizontalPodAutoscaler")
    asked = {
        name: {
            each["metadata"]["query"]: each["metadata"]["threshold"] for each in document["spec"]["triggers"]
        }
        for name, document in rendered.of("ScaledObject").items()
    }
    decode = f'{{namespace="{NAMESPACE}",pod=~"baton-a-decode-.+"}}'
    assert asked == {
        "baton-a-prefill": {f"sum(baton_waiting{decode.replace('decode', 'prefill')})": "4"},
        "baton-a-decode": {f"sum(baton_wait_seconds{decode})": "0.5", f"sum(baton_kv_usage{decode})": "0.8"},
    }


def test_volumes_are_mounted_and_mounts_have_volumes(rendered):
    for role, pod in rendered.pods().items():
        (container,) = pod["spec"]["containers"]
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in pod["spec"]["volumes"]}
        assert len({each["mountPath"] for each in mounts.values()}) == len(mounts)
        writable = {each["mountPath"] for each in mounts.values() if not each.get("readOnly")}
        assert "/tmp" in writable
        assert ("/home/baton/.cache/huggingface" in writable) == (role != "gateway")


def test_models_caches_and_tokens_come_from_where_they_are_said_to(helm):
    for role, pod in helm[1]["everything"].pods().items():
        sources = [each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]]
        claims = {source["claimName"] for source in sources if source}
        assert claims == (set() if role == "gateway" else {"models", "cache"})
        env = {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}
        assert ("HF_TOKEN" in env) == (role != "gateway")
        if role != "gateway":
            assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "mine"}
            assert env["HF_HUB_OFFLINE"]["value"] == "1"


@pytest.mark.parametrize("name", ["defaults", "everything"])
def test_shared_memory_of_the_machine_only_when_asked_for(helm, name):
    for role, pod in helm[1][name].pods().items():
        mounts = [each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]]
        assert ("/dev/shm" in mounts) == (name == "everything" and role in ("prefill", "decode", "encode"))


def test_pods_run_without_privileges(rendered):
    users = [
        line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if line.startswith("USER")
    ]
    user, group = users[-1].removeprefix("USER ").split(":")
    for pod in rendered.pods().values():
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == int(user)
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"] == int(group)
        assert not spec["automountServiceAccountToken"] and not spec["enableServiceLinks"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        assert "command" not in container  # the image's entry point gives each process an id of its own


def test_only_the_first_pod_of_a_group_is_found(helm):
    rendered = helm[1]["ranks"]
    (group,) = rendered.of("LeaderWorkerSet").values()
    selector = rendered.of("Service")["baton-decode"]["spec"]["selector"]
    assert selects(selector, member(group, "leaderTemplate", 0))
    assert not selects(selector, member(group, "workerTemplate", 1))
    for kind, where in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        labels = rendered.of(kind)["baton-decode"]["spec"][where]["matchLabels"]
        assert selects(labels, member(group, "workerTemplate", 1))
