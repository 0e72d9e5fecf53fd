"""Three cells, each a gateway with a tokenizer, a prefill and a decode node, and a picker that knows of each
what the model server protocol of the Gateway API inference extension says, and whether it is ready."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from checkpoints import make_model, save
from deployment import Deployment
from polling import wait
from prometheus_client.parser import text_string_to_metric_families

from baton.client import Client

KEY, SECRET = "k" * 32, "s" * 64
ROWS = 2
POOL = 131_072
LONG = {"max_tokens": 10_000, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Member:
    """What a picker scrapes of a cell."""

    queued: float
    running: float
    kv_usage: float
    block_size: int
    blocks: int


def scrape(cell: Deployment) -> Member:
    """With neither key nor token, as pickers do."""
    with urllib.request.urlopen(f"http://{cell.gateway.http}/metrics", timeout=10) as response:
        found = {each.name: each for each in text_string_to_metric_families(response.read().decode())}

    def value(name: str) -> float:
        (sample,) = found[f"vllm:{name}"].samples
        return sample.value

    (info,) = found["vllm:cache_config_info"].samples
    return Member(
        value("num_requests_waiting"),
        value("num_requests_running"),
        value("kv_cache_usage_perc"),
        int(info.labels["block_size"]),
        int(info.labels["num_gpu_blocks"]),
    )


def ready(cell: Deployment) -> bool:
    """As the kubelet asks: only ready pods are a pool's members."""
    try:
        with urllib.request.urlopen(f"http://{cell.gateway.http}/health", timeout=10) as response:
            return response.status == 200
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False


def pick(cells: list[Deployment]) -> Deployment:
    """The least loaded member: by queue and running requests, in relation to the others', and by KV use."""
    members = [(cell, scrape(cell)) for cell in cells if ready(cell)]

    def share(member: Member, what: str) -> float:
        values = [getattr(each, what) for _, each in members]
        least, most = min(values), max(values)
        return (getattr(member, what) - least) / (most - least) if most > least else 0.0

    return min(members, key=lambda m: share(m[1], "queued") + share(m[1], "running") + m[1].kv_usage)[0]


def served_by(cell: Deployment) -> str:
    """A completion of the cell's, by its HTTP API."""
    body = {"model": "model", "prompt": "import os", "max_tokens": 4}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    url = f"http://{cell.gateway.http}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


@contextlib.contextmanager
def occupied(cell: Deployment, streams: int, prompt: int) -> Iterator[None]:
    """The cell has so many requests of so many prompt tokens. As nobody reads, they soon pause, and keep rows
    and pages."""
    client: Client = cell.client()
    with contextlib.ExitStack() as stack:
        for number in range(streams):
            tokens = [5 + number, *(5 + place % 200 for place in range(1, prompt))]
            stack.enter_context(client.stream(token_ids=tokens, **LONG))
        yield


@pytest.fixture
def cells(tmp_path, deployments) -> Iterator[list[Deployment]]:
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    model = save(make_model("qwen3", max_position_embeddings=40_000, **tiny), tmp_path / "model")
    gateway = ("--open-metrics", "--max-unread-tokens", "200", "--slow-reader-seconds", "300")
    found = []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        for name in "abc":
            folder = tmp_path / name
            folder.mkdir()
            cell = Deployment.split(
                folder,
                model,
                worker=("--kv-tokens", str(POOL)),
                decode_flags=("--max-rows", str(ROWS)),
                gateway_flags=gateway,
            )
            found.append(cell.close_to_strangers(SECRET, KEY))
            stack.push(cell)
        deployments += list(pool.map(Deployment.start, found))
        yield found


@pytest.mark.thorough
def test_a_picker_finds_the_idle_cell_and_leaves_those_that_cannot_compute(cells):
    a, b, c = cells
    idle = Member(0, 0, 0, 16, POOL // 16)
    wait(lambda: all(scrape(cell) == idle for cell in cells), "first reports")
    with occupied(a, ROWS + 2, 40), occupied(b, ROWS, 20_000):
        wait(lambda: scrape(a).queued == 2 and scrape(a).running == ROWS, "a queue in a")
        wait(lambda: scrape(b).running == ROWS and scrape(b).kv_usage > 0.3, "a full pool in b")
        assert scrape(b).queued == 0
        assert pick(cells) is c and served_by(c)
        with occupied(c, ROWS + 3, 20_000):
            wait(lambda: scrape(c).queued == 3, "a queue in c")
            assert pick(cells) is b
        wait(lambda: pick(cells) is c, "c is idle again")
        c.prefill.kill()
        assert served_by(c), "a decode node computes prompts, too"
        assert ready(c) and pick(cells) is c
        c.decode.kill()
        wait(lambda: not ready(c), "c is not ready")
        assert pick(cells) is not c
    wait(lambda: pick(cells) is a, "a is idle again")
