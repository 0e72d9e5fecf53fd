"""Fifty clients that ask for much and read nothing: what the gateway keeps for them is bounded, and others go
on as if they were not there. Steps take a fixed time and compute nothing (--step-profile)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from dataclasses import asdict

import grpc
import psutil
import pytest
from asking import greedy
from checkpoints import make_model, save
from deployment import Deployment
from polling import until

from baton.client import AsyncClient
from baton.slo import tpot
from baton.step_cost import StepCost
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.alone, pytest.mark.times]

CLIENTS = 50
"""Half by gRPC, with twenty alternatives for each token, half by HTTP."""
UNREAD = 500
STEP_SECONDS = 0.004
PAUSED_SECONDS = 120.0
TOKENS = 30_000
TOKEN_BYTES = 700
"""What a token with twenty alternatives takes in the gateway; without them it is 30."""
BUFFER_BYTES = 2**20
"""Of one client's connection: what gRPC, the HTTP server and the log hold beside the tokens."""
BOUND = CLIENTS * (UNREAD * TOKEN_BYTES + BUFFER_BYTES)
READ = 200
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    # What the client's own library takes in ahead of its reader counts as read.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4096),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, deployments):
    folder = tmp_path_factory.mktemp("slow")
    model = make_model(
        "qwen3", max_position_embeddings=2 * TOKENS, hidden_size=32, num_hidden_layers=1, head_dim=8
    )
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"step": asdict(StepCost(STEP_SECONDS, 0.0, 0.0, 0.0, 0.0))}))
    worker = ("--step-profile", str(profile), "--kv-tokens", str(CLIENTS * TOKENS // 2))
    gateway = ("--max-unread-tokens", str(UNREAD), "--slow-reader-seconds", "60")
    made = Deployment.split(
        folder, save(model, folder / "model"), prefill=0, worker=worker, gateway_flags=gateway
    )
    with made:
        deployments.append(made)
        yield made


@contextlib.contextmanager
def deaf_clients(deployment: Deployment):
    """They have asked, and never read."""
    body = {"model": "model", "prompt": "x", "max_tokens": TOKENS, "stream": True, "temperature": 0}
    text = json.dumps({**body, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, _, port = deployment.gateway.http.rpartition(":")
    sampling = common_pb2.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=20)
    start = inference_pb2.GenerateStart(id="0", text="x", sampling=sampling)
    with contextlib.ExitStack() as stack:
        calls = []
        for _ in range(CLIENTS // 2):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            deaf.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
            channel = grpc.insecure_channel(deployment.gateway.address, options=OPTIONS)
            stack.callback(channel.close)
            stub = inference_pb2_grpc.InferenceStub(channel)
            calls.append(stub.Generate(iter([inference_pb2.GenerateRequest(start=start)])))
            stack.callback(calls[-1].cancel)
        yield


def paused(deployment: Deployment) -> int:
    return deployment.decode.load().paused


async def reads(deployment: Deployment) -> float:
    """A client that reads: seconds per token."""
    arrivals = []
    async with AsyncClient(deployment.gateway.address) as client:
        async for delta in client.stream(**greedy([5, 6, 7], READ, timeout=60)):
            arrivals.append((time.monotonic(), len(delta.token_ids)))
    assert sum(count for _, count in arrivals) == READ
    seconds = tpot([each for each in arrivals if each[1]])
    assert seconds is not None
    return seconds


async def test_clients_that_do_not_read_cost_a_bounded_memory_and_nobody_time(deployment):
    gateway = psutil.Process(deployment.gateway.pid)
    await reads(deployment)
    alone, before = await reads(deployment), gateway.memory_info().rss
    with deaf_clients(deployment):
        await until(lambda: paused(deployment) == CLIENTS, "all are paused", PAUSED_SECONDS)
        steps = deployment.decode.load().steps
        beside = await reads(deployment)
        grown = gateway.memory_info().rss - before
        await asyncio.sleep(1.0)
        later = gateway.memory_info().rss - before
        kept = deployment.decode.load().output_tokens
    print(
        f"{CLIENTS} deaf clients: {grown / 2**20:.1f} MiB, {later / 2**20:.1f} later, of {BOUND / 2**20:g}; "
        f"TPOT alone {1e3 * alone:.1f} ms, beside them {1e3 * beside:.1f}; "
        f"{kept} tokens, {steps} steps"
    )
    assert grown < BOUND and later < BOUND
    assert beside < 2 * alone + STEP_SECONDS
    deployment.assert_idle(20)
