"""The gateway as a process: start, ports, health, reflection, no peers."""

import asyncio
import socket

import grpc
import httpx
import pytest
from gateway_rig import gateway
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_decode import ScriptedDecode, saying, silent

from baton.api import server
from baton.config import GatewayConfig
from baton.rpc.channel import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc
from ports import free_port


async def test_taken_ports_are_one_readable_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for config in (GatewayConfig(port=port, http_port=0), GatewayConfig(http_port=port)):
            assert await asyncio.wait_for(server.serve(config, stop=asyncio.Event()), 20) == 2
            last = capsys.readouterr().err.strip().splitlines()[-1]
            assert str(port) in last and last.startswith("baton gateway: ")


async def test_node_health_and_info():
    async with (
        ScriptedDecode(silent) as node,
        gateway(node) as rig,
        open_channel(rig.node.address) as channel,
    ):
        info = await node_pb2_grpc.NodeStub(channel).GetInfo(node_pb2.GetInfoRequest())
        assert (info.role, info.address, info.model.name) == ("gateway", rig.node.address, "scripted")
        assert [(peer.role, peer.connected) for peer in info.peers] == [("tokenizer", True), ("decode", True)]
        assert info.http_address and info.incarnation
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "baton.v1.Inference"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        models = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
        assert [(model.name, model.chat) for model in models.models] == [("scripted", True)]


@pytest.mark.parametrize(
    ("given", "listed", "more"),
    [
        ("mine", ["mine"], []),
        ("claude-*, mine,gpt", ["mine", "gpt"], ["claude-opus/x\ny", "claude-"]),
        ("a*b*", ["scripted"], ["ab", "a.b."]),
    ],
)
async def test_served_names_are_what_clients_ask_for(given, listed, more):
    async with (
        ScriptedDecode(saying([40])) as node,
        gateway(node, served_name=given) as rig,
        httpx.AsyncClient(base_url=rig.http, trust_env=False) as http,
    ):
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == listed
        assert rig.node.gateway.model().name == listed[0]
        for name in (*listed, *more):
            answer = await http.post("/v1/completions", json={"model": name, "prompt": "x"})
            assert answer.status_code == 200 and answer.json()["model"] == name
        assert (await http.get(f"/v1/models/{more[-1] if more else given}")).json()["object"] == "model"
        for wrong in ("minee", "xclaude-", "a.c", "claude-" + 300 * "x", "gp.", ""):
            assert (await http.get(f"/v1/models/{wrong}")).status_code == 404, wrong
        refused = await http.post("/v1/completions", json={"model": "minee", "prompt": "x"})
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"


async def test_without_peers_http_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(server, "START_SECONDS", 0.3)
    grpc_port, http_port, nowhere = free_port(), free_port(), f"127.0.0.1:{free_port()}"
    config = GatewayConfig(port=grpc_port, http_port=http_port, tokenizer=(nowhere,), decode=(nowhere,))
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(server.serve(config, ready=ready, stop=stop))
    await asyncio.wait_for(ready.wait(), 10)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}") as http:
        health = await http.get("/health")
        assert health.status_code == 503
        assert [peer["connected"] for peer in health.json()["peers"]] == [False, False]
        answer = await http.post("/v1/completions", json={"model": "x", "prompt": "x"})
        assert answer.status_code == 503 and nowhere in answer.json()["error"]["message"]
    async with open_channel(f"127.0.0.1:{grpc_port}") as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate()
        start = inference_pb2.GenerateStart(id="a", text="x")
        await call.write(inference_pb2.GenerateRequest(start=start))
        assert (await call.read()).failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
    stop.set()
    assert await asyncio.wait_for(task, 15) == 0
