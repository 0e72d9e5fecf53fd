"""A library's panic, which is no Exception, in a servicer: the call is answered."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.errors import from_rpc_error
from baton.rpc.interceptors import MalformedMessages


class Panic(BaseException):
    """As pyo3's PanicException."""


class Panicking(health_pb2_grpc.HealthServicer):
    async def Check(self, request, context):
        raise Panic("index out of bounds")

    async def Watch(self, request, context):
        yield health_pb2.HealthCheckResponse()
        raise Panic("index out of bounds")


async def test_a_panic_is_an_error():
    refused = []
    server = grpc.aio.server(
        interceptors=[MalformedMessages(lambda error, context: refused.append(error.reason))]
    )
    health_pb2_grpc.add_HealthServicer_to_server(Panicking(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert "Panic" in from_rpc_error(raised.value).message
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        await watching.read()
        with pytest.raises(grpc.RpcError) as raised:
            await watching.read()
        assert raised.value.code() is grpc.StatusCode.INTERNAL
    await server.stop(0)
    assert refused == ["INTERNAL", "INTERNAL"]
