"""Reports of `baton bench`: what was measured, where, and how its figures are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from baton.bench.machine import machine, versions
from baton.bench.workload import Workload
from baton.cli.nodes import ask_deployment


async def deployment_facts(server: str) -> dict[str, Any]:
    """What the processes of a deployment, those that answer, say about themselves."""
    processes = []
    for report in await ask_deployment(server):
        info = report.info
        if info is None:
            continue
        facts: dict[str, Any] = {"role": report.role, "address": report.address}
        facts |= {"version": info.version, "device": info.device, "attention": info.attention}
        if info.HasField("layout"):
            facts["page_size"] = info.layout.page_size
            facts["transports"] = [endpoint.WhichOneof("kind") for endpoint in info.endpoints]
        if info.HasField("model"):
            model = info.model
            facts["model"] = {
                "name": model.name,
                "architecture": model.architecture,
                "context_length": model.context_length,
                "dtype": model.dtype,
                "parameters": model.parameters,
                "fingerprint": model.fingerprint,
            }
        if report.load is not None:
            facts["pages"] = report.load.pages.total
        processes.append(facts)
    return {"server": server, "processes": processes}


def about(measurement: str, commit: str) -> dict[str, Any]:
    """The first part of a report: what was measured, where, with what."""
    return {"measurement": measurement, "machine": machine(), "versions": versions(commit)}


def save(figures: dict[str, Any], file: Path | None) -> None:
    """As JSON."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def table(*columns: str) -> Table:
    """Right-aligned but for the first column."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        found.add_column(column, justify="right" if index else "left", no_wrap=True)
    return found


def shown(value: float | None, digits: int = 1) -> str:
    """A number; "-" for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def warnings(figures: dict[str, Any], work: Workload) -> Iterator[str]:
    """What a reader of a run's figures must know."""
    for reason, failures in figures["failures"].items():
        yield f"{failures} of {figures['requests']} requests failed: {reason}"
    if figures["client_busy"] > 0.8:
        busy = f"{figures['client_busy']:.0%}"
        yield f"a client used {busy} of a core: it may have been the limit; raise --clients"
    alone = work.kind == "random" and not work.shared_prefix
    if alone and figures["cached_tokens"] > 0.05 * figures["prompt_tokens"]:
        part = figures["cached_tokens"] / figures["prompt_tokens"]
        yield f"{part:.0%} of the prompt tokens were cached, as if asked before: take another --seed"
    if figures["retractions"]:
        yield f"{figures['retractions']} requests were retracted and computed again: the KV pool was full"
