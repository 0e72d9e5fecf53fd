"""One of two gateways is killed while streams run: they go on at the other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from deployment import Deployment
from stress.gateways import KEY, kill_gateways, two_gateways
from stress.gateways_proxied import kill_behind_proxy

from proxies import program

KILLS = 4
BODY = {"model": "demo", "prompt": "def add(a, b):", "seed": 3, "max_tokens": 200, "stream": True}


def test_every_stream_goes_on_at_the_other_gateway(tmp_path, deployments):
    with two_gateways(tmp_path, "demo") as deployment:
        deployments.append(deployment)
        seen = asyncio.run(kill_gateways(deployment, kills=KILLS, streams=8, count=10, max_tokens=150))
        assert not seen.problems, "\n".join(seen.problems)
        assert seen.kills == KILLS and seen.resumed >= KILLS, seen
        go_on_by_http(deployment)
        if (haproxy := program("haproxy")) is not None:
            behind_proxy(deployment, haproxy, tmp_path)
        deployment.assert_idle()


def behind_proxy(deployment: Deployment, haproxy: str, folder: Path) -> None:
    """The stock client sees an error only of a stream that had begun."""
    seen = asyncio.run(kill_behind_proxy(deployment, haproxy, folder, kills=KILLS, clients=8))
    assert not seen.problems, "\n".join(seen.problems)
    assert seen.kills == KILLS and seen.whole and seen.streams and seen.retried, seen


def go_on_by_http(deployment: Deployment) -> None:
    """A client with nothing but the ticket and the id of its last event: the decode node has the tokens."""
    one, two = deployment.of("gateway")
    calm, _, _ = read(one.info().http_address, BODY)
    begun, ticket, position = read(one.info().http_address, BODY, until=5, then=one.kill)
    assert calm.startswith(begun) and begun != calm
    head = {"x-baton-resume": ticket, "last-event-id": position}
    rest, _, _ = read(two.info().http_address, BODY, **head)
    assert begun + rest == calm
    one.start()
    one.wait_ready()


def read(
    address: str, body: dict[str, Any], until: int = 0, then: Any = None, **head: str
) -> tuple[str, str, str]:
    """The text of a stream, or of as many of its events; its ticket; the id of the last event."""
    text, position, events = "", "", 0
    head["authorization"] = f"Bearer {KEY}"
    with httpx.stream(
        "POST", f"http://{address}/v1/completions", json=body, headers=head, timeout=120
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("id: "):
                position = line[4:]
            elif line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                events += 1
                if events == until:
                    then()
                    break
        return text, answer.headers["x-baton-resume"], position
