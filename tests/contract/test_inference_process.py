"""The gateway as a process: start, ports, health, reflection, no peers."""

import asyncio
import socket

import grpc
import httpx
from gateway_rig import gateway
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_decode import ScriptedDecode, silent

from baton.config import GatewayConfig
from baton.gateway import server
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


async def test_served_name_is_what_clients_ask_for():
    async with ScriptedDecode(silent) as node, gateway(node, served_name="mine") as rig:
        assert rig.node.gateway.model().name == "mine"


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
