"""Server reflection, by its names of today and of old: grpc.reflection.v1 and v1alpha.

grpcio-reflection has v1alpha alone. The messages of v1 are the same, so one servicer answers for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

OLD = reflection.SERVICE_NAME
SERVICES = (OLD.replace("v1alpha", "v1"), OLD)
_METHOD = "ServerReflectionInfo"


def add_to(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Answers for these services and for itself."""
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICES), pool=_pool())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in SERVICES:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {_METHOD: handler}),))


def _pool() -> descriptor_pool.DescriptorPool:
    """The default pool, in which v1 is described too."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(SERVICES[0])
    except KeyError:
        old = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(old)
        new = descriptor_pb2.FileDescriptorProto()
        text_format.Parse(text_format.MessageToString(old).replace("v1alpha", "v1"), new)
        pool.Add(new)
    return pool
