"""The pool of the Gateway API's inference extension: its members, and what leads to them."""

from __future__ import annotations

from chart import selects
from processes import settings

KINDS = ("InferencePool", "HTTPRoute")


def pool_of(rendered):
    (pool,) = rendered.of("InferencePool").values()
    return pool


def test_members_are_the_gateways_of_all_releases_that_name_the_pool(helm):
    pool = pool_of(helm[1]["pool"])
    members = {
        (name, role)
        for name, rendered in helm[1].items()
        for role, pod in rendered.pods().items()
        if selects(pool["spec"]["selector"]["matchLabels"], pod)
    }
    assert members == {("pool", "gateway"), ("cell", "gateway")}


def test_the_pool_may_be_anothers(helm):
    """The label by which the extension's own chart is told the members is no other pod's."""
    rendered = helm[1]["route"]
    assert [bool(rendered.of(kind)) for kind in KINDS] == [False, True]
    label = {"app.kubernetes.io/part-of": "406"}
    assert [role for role, pod in rendered.pods().items() if selects(label, pod)] == ["gateway"]


def test_who_only_joins_makes_nothing(helm):
    for name in helm[1].keys() - {"pool", "route"}:
        assert not any(helm[1][name].of(kind) for kind in KINDS)


def test_requests_go_to_the_port_of_the_http_apis(helm):
    rendered = helm[1]["pool"]
    pool = pool_of(rendered)
    (container,) = rendered.pods()["gateway"]["spec"]["containers"]
    assert {"name": "http", "containerPort": pool["spec"]["targetPorts"][0]["number"]} in container["ports"]
    assert pool["spec"]["endpointPickerRef"] == {
        "name": "405-epp",
        "port": {"number": 9002},
        "failureMode": "FailOpen",
    }


def test_the_route_leads_to_the_pool_and_not_to_its_metrics(helm):
    (route,) = helm[1]["pool"].of("HTTPRoute").values()
    (rule,) = route["spec"]["rules"]
    assert [each["name"] for each in rule["backendRefs"]] == [pool_of(helm[1]["pool"])["metadata"]["name"]]
    (match,) = rule["matches"]
    assert match["path"] == {"type": "PathPrefix", "value": "/v1"}
    assert route["spec"]["parentRefs"] == [
        {"name": "public", "namespace": "gateways", "sectionName": "https"}
    ]
    assert route["spec"]["hostnames"] == ["llm.example.org"]


def test_only_members_show_metrics_to_whoever_asks(helm, rendered, monkeypatch):
    config = settings("gateway", dict(rendered.containers())["gateway"], monkeypatch)
    assert config.open_metrics == (rendered in [helm[1][name] for name in ("pool", "cell", "route")])
    assert config.api_keys or rendered is helm[1]["open"], "requests need a key as before"
