"""The metrics of a running deployment are those that docs/metrics.md lists, and the other way around."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.main_path
PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
ROLES = frozenset(("gateway", "tokenizer", "prefill", "decode"))
SERIES = re.compile(r"`((?:baton_|vllm:)\w+?)(_total)?(?:\{([\w,]+)\})?`")


@dataclass(frozen=True)
class Listed:
    kind: str
    """counter, gauge or histogram."""
    labels: frozenset[str]
    """Beside `role`."""
    exposed_by: frozenset[str]
    counted_by: frozenset[str]


def listed() -> dict[str, Listed]:
    """Name, without a counter's `_total`, -> what the tables say: those of counters and gauges are of every
    process, that of series is the gateway's."""
    found: dict[str, Listed] = {}
    columns: list[str] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or not columns:
            columns = cells if line.startswith("|") else []
            continue
        row = dict(zip(columns, cells, strict=True))
        if columns[0] not in ("counter", "gauge", "histogram", "series"):
            continue
        everywhere = columns[0] != "series"
        kind = columns[0] if everywhere else row["type"]
        counted_by = row["of"] if everywhere else "gateway"
        for name, total, labels in SERIES.findall(cells[0]):
            assert name not in found, f"{name} stands there twice"
            assert (total == "_total") == (kind == "counter"), name
            found[name] = Listed(
                kind,
                frozenset(labels.split(",") if labels else ()),
                ROLES if everywhere else frozenset({"gateway"}),
                ROLES if counted_by == "all" else frozenset(counted_by.split(", ")),
            )
    return found


def families(address: str) -> dict[str, Any]:
    """Name -> metric family."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        found = {each.name: each for each in text_string_to_metric_families(response.read().decode())}
    return found


@pytest.fixture(scope="module")
def exposed(tmp_path_factory, deployments) -> Iterator[dict[str, dict[str, Any]]]:
    """Role -> families, after a few requests."""
    http = ("--http-port", "0")
    deployment = Deployment.split(tmp_path_factory.mktemp("metrics"), "demo", worker=http)
    deployment.tokenizer.flags += http
    with deployment:
        deployments.append(deployment)
        client = deployment.client()
        for number in (0, 1, 2, 0):  # the last prompt is cached
            client.generate(f"{number} " + "def main(): " * 20, max_tokens=8)
        deadline = time.monotonic() + 30  # nodes report their loads within a second
        while families(deployment.gateway.http)["vllm:num_requests_running"].samples[0].value:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield {process.role: families(process.http) for process in deployment.processes}


def test_what_is_exposed_is_listed_and_what_is_listed_is_exposed(exposed):
    assert exposed.keys() == ROLES
    for role, found in exposed.items():
        assert found.keys() == {name for name, entry in listed().items() if role in entry.exposed_by}, role


def test_types_and_labels_are_as_listed(exposed):
    for role, found in exposed.items():
        for name, family in found.items():
            entry = listed()[name]
            assert family.type == entry.kind, name
            labels = {label for sample in family.samples for label in sample.labels} - {"role", "model", "le"}
            assert labels <= entry.labels, f"{name} of {role}"


def test_every_series_names_the_model_and_none_says_when_it_began(exposed):
    samples = [sample for found in exposed.values() for family in found.values() for sample in family.samples]
    assert {sample.labels["model"] for sample in samples} == {"demo"}
    assert not [sample.name for sample in samples if sample.name.endswith("_created")]


def test_a_scraper_chooses_by_the_names_of_the_model_server_protocol(exposed):
    """Those of the Gateway API inference extension."""
    found = exposed["gateway"]
    values = {
        name: found[f"vllm:{name}"].samples[0].value
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    }
    assert values == {"num_requests_waiting": 0, "num_requests_running": 0, "kv_cache_usage_perc": 0}
    (info,) = found["vllm:cache_config_info"].samples
    pages = next(s.value for s in exposed["decode"]["baton_pages"].samples if s.labels["state"] == "total")
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("16", f"{pages:.0f}")


def test_nobody_counts_what_is_listed_as_anothers(exposed):
    counted = set()
    for role, found in exposed.items():
        for name, family in found.items():
            if any(sample.value for sample in family.samples):
                assert role in listed()[name].counted_by, f"{name} of {role}"
                counted.add((role, name))
    assert counted >= {
        ("prefill", "baton_steps"),
        ("decode", "baton_pulled_pages"),
        ("tokenizer", "baton_prompt_tokens"),
        ("gateway", "baton_ttft_seconds"),
    }
