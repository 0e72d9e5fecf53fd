"""docker-compose.yaml for real: built, started, asked from outside, killed, scaled, taken down.

The tests share one deployment and run in the order in which they stand.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine import FIRST_TOKEN_SECONDS, run
from openai import OpenAI

from baton.client import Client, Completion

pytestmark = pytest.mark.timeout(1500)

PROMPT = "def main():"
LONG = " ".join(f"word{number}" for number in range(40))
"""More tokens than a decode node prefills itself."""


def answer(deployed, **options) -> str:
    with Client(deployed.grpc) as client:
        return "".join(delta.text for delta in client.stream(temperature=0, **options))


def health(deployed):
    with urllib.request.urlopen(f"http://{deployed.http}/health", timeout=30) as response:
        return json.load(response)


def until(condition, what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


def test_first_token_comes_soon(deployed, times):
    """Six processes that load torch one after the other where there are fewer cores than they are, and other
    tests beside them."""
    slower = 1 if len(os.sched_getaffinity(0)) >= 6 else 5
    assert times["up to first token"] < slower * FIRST_TOKEN_SECONDS


def test_both_apis_stream_from_outside(deployed):
    with Client(deployed.grpc) as client:
        deltas = list(client.stream(PROMPT, max_tokens=24, temperature=0))
    assert len(deltas) > 2
    client = OpenAI(base_url=f"http://{deployed.http}/v1", api_key="none", timeout=240, max_retries=0)
    chunks = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == "".join(delta.text for delta in deltas)


def test_pages_travel_through_shared_memory_of_containers(deployed):
    """Prompts take turns at the prefill nodes, once both have started and the decode nodes have found both.
    Those that come before are answered too, by whom there is."""
    used: dict[str, set[str]] = {}
    # Of a prompt whose first token is the last no pages are pulled.
    options = {"max_tokens": 4, "ignore_eos": True, "hand_off": True}

    def both_used() -> bool:
        stats = client.generate(f"{time.monotonic()} {LONG}", **options).stats
        if stats.prefill_address:
            used.setdefault(stats.transport, set()).add(stats.prefill_address)
        return len(used.get("shm", ())) == 2

    with Client(deployed.grpc) as client:
        until(both_used, "both prefill nodes have computed a prompt")
    assert used.keys() == {"shm"}


def test_containers_are_what_they_should_be(deployed):
    compose = deployed.compose
    ids = set()
    workers = [*compose.containers("prefill"), *compose.containers("decode")]
    assert len(workers) == 4
    for container in workers:
        about = compose.inspect(container)
        assert about["HostConfig"]["ReadonlyRootfs"] and about["HostConfig"]["CapDrop"] == ["ALL"]
        assert not about["HostConfig"]["PortBindings"]
        script = "import os, psutil; print(os.getuid(), [p.pid for p in psutil.process_iter()][1])"
        user, pid = run(["docker", "exec", container, "python", "-c", script]).split()
        assert user != "0"
        ids.add(pid)
    assert len(ids) == 4, f"CUDA IPC needs a process id of its own in each container: {ids}"
    (gateway,) = compose.containers("gateway")
    published = compose.inspect(gateway)["HostConfig"]["PortBindings"]
    assert {each["HostIp"] for bindings in published.values() for each in bindings} == {"127.0.0.1"}


def test_health_checks_pass(deployed):
    """The command of each check, run here: when the engine runs it, and what it makes of a late answer, is
    the engine's own affair."""
    compose = deployed.compose
    services = ("gateway", "tokenizer", "prefill", "decode")
    containers = [each for service in services for each in compose.containers(service)]
    assert len(containers) == 6
    until(lambda: [peer["connected"] for peer in decode_peers(deployed)] == [True] * 2, "both have loaded")
    for container in containers:
        kind, *command = compose.inspect(container)["Config"]["Healthcheck"]["Test"]
        assert kind == "CMD"
        assert run(["docker", "exec", container, *command]) == "SERVING\n"


def test_streams_outlive_a_killed_decode_container(deployed):
    compose = deployed.compose
    prompts = [f"{number} {LONG}" for number in range(4)]
    options = {"max_tokens": 800, "ignore_eos": True}
    expected = [answer(deployed, prompt=prompt, **options) for prompt in prompts]
    victim = compose.containers("decode")[0]
    under_way = threading.Barrier(len(prompts) + 1, timeout=240)

    def ask(prompt: str) -> Completion:
        with Client(deployed.grpc) as client, client.stream(prompt, temperature=0, **options) as stream:
            next(iter(stream))
            under_way.wait()
            return stream.completion()

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        under_way.wait()
        run(["docker", "kill", victim])
        completions = [each.result(timeout=240) for each in answers]
    assert [each.text for each in completions] == expected
    assert any(each.stats.resumed for each in completions), "all had ended before the container was killed"
    until(lambda: sum(peer["connected"] for peer in decode_peers(deployed)) == 1, "the loss is seen")


def test_a_scaled_service_is_used(deployed):
    """The killed container is started again, a third one comes; the gateway finds both by itself."""
    deployed.compose("up", "-d", "--no-build", "--scale", "decode=3")
    until(lambda: [peer["connected"] for peer in decode_peers(deployed)] == [True] * 3, "three decode nodes")
    with ThreadPoolExecutor(3) as pool:
        options = {"prompt": LONG, "max_tokens": 64, "ignore_eos": True}
        answers = [pool.submit(answer, deployed, **options) for _ in range(3)]
        assert len({each.result(timeout=240) for each in answers}) == 1


def test_nothing_is_left(deployed, times):
    """Last: takes it down."""
    started = time.monotonic()
    deployed.compose("down", "-v")
    times["down"] = time.monotonic() - started
    assert deployed.compose.left() == []


def decode_peers(deployed):
    return [peer for peer in health(deployed)["peers"] if peer["role"] == "decode"]
