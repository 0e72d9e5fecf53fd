"""A real Prometheus scrapes a running deployment: rules and the dashboard's queries find their series."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployment import Deployment

from ports import free_port

FOLDER = Path(__file__).resolve().parents[2] / "deploy/observability"
PROMETHEUS = shutil.which("prometheus")
SECONDS = 60.0

pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus (Debian: prometheus)"),
]

NOT_YET = re.compile(r"baton_(problems|handoff_retry_reasons_total|gateway_failures_total)\b")
"""Series that begin with the first trouble."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, deployments) -> Iterator[httpx.Client]:
    """After some traffic, and three scrapes."""
    folder = tmp_path_factory.mktemp("prometheus")
    http = ("--http-port", "0")
    deployment = Deployment.split(folder, "demo", worker=http)
    deployment.tokenizer.flags += http
    with deployment:
        deployments.append(deployment)
        targets = [process.http for process in deployment.processes]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "baton.rules.yml")],
            "scrape_configs": [{"job_name": "baton", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        address = f"127.0.0.1:{free_port()}"
        with (folder / "prometheus.log").open("w") as log:
            process = subprocess.Popen(
                [
                    str(PROMETHEUS),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False) as client:
                wait(client, len(targets), folder / "prometheus.log")
                for number in range(6):
                    prompt = [*range(5 + number, 205 + number)]
                    deployment.client().generate(token_ids=prompt, max_tokens=8, hand_off=bool(number % 2))
                    time.sleep(0.7)
                time.sleep(2.5)
                yield client
        finally:
            process.terminate()
            process.wait(20)


def wait(client: httpx.Client, targets: int, log: Path) -> None:
    """Until all targets have been scraped."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if len(result(client, 'up{job="baton"} == 1')) == targets:
                return
        except (httpx.TransportError, httpx.HTTPStatusError):
            pass  # it starts
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)


def result(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    response = client.get("/query", params={"query": query})
    response.raise_for_status()
    answer = response.json()
    assert answer["status"] == "success", (query, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def queries() -> list[tuple[str, str]]:
    """Titles and queries of the dashboard's panels, with Grafana's variables filled in."""
    dashboard = json.loads((FOLDER / "grafana/baton.json").read_text())
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "10m").replace("$job", ".*"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def names(query: str) -> set[str]:
    return set(re.findall(r"\bbaton[_:]\w+(?:[_:]\w+)*", query))


@pytest.mark.parametrize(("title", "query"), queries(), ids=[query for _, query in queries()])
def test_each_query_of_the_dashboard_finds_something(prometheus, title, query):
    # On a busy machine a scrape may come too late, and its series are missed until the next.
    deadline = time.monotonic() + SECONDS
    while not (found := result(prometheus, query)) or all(sample["value"][1] == "NaN" for sample in found):
        if NOT_YET.search(query):
            break
        assert time.monotonic() < deadline, (title, found)
        time.sleep(0.2)


def test_each_rule_reads_series_that_there_are(prometheus):
    groups = prometheus.get("/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 15
    for rule in rules:
        assert rule["health"] == "ok" and not rule.get("lastError"), rule
        for name in names(rule["query"]):
            assert NOT_YET.search(name) or result(prometheus, f"count({name})"), (rule["name"], name)


def test_nothing_fires_where_all_is_well(prometheus):
    alerts = prometheus.get("/alerts").json()["data"]["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []


def test_what_begins_with_trouble_is_listed(prometheus):
    """Else a wrong name among them would never be noticed."""
    listed = (FOLDER.parents[1] / "docs/metrics.md").read_text()
    for _, query in queries():
        for name in names(query):
            if NOT_YET.search(name):
                assert f"`{name}" in listed, name
