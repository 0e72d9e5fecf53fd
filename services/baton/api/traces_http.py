"""GET /traces: the same answers as baton.v1.Traces, as JSON."""

from __future__ import annotations

import asyncio
import json

from fastapi import Request
from google.protobuf.json_format import MessageToDict
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.traces import DEFAULT_TRACES, Traces, answer
from baton.rpc.errors import invalid_field
from baton.v1 import trace_pb2

TRACES_PATH = "/traces"


def traces_route(traces: Traces) -> Route:
    """Query: `id` (several), or `limit` and `slowest`; `gateway_only`."""

    async def get(request: Request) -> Response:
        query = request.query_params
        limit = query.get("limit", str(DEFAULT_TRACES))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 9):
            raise invalid_field("limit", f"must be a number, not {limit[:40]!r}")
        asked = trace_pb2.GetTracesRequest(
            ids=query.getlist("id"),
            limit=int(limit),
            slowest=_flag(request, "slowest"),
            gateway_only=_flag(request, "gateway_only"),
        )
        found = await answer(traces, asked)
        # In a thread: tens of thousands of events take seconds.
        return Response(await asyncio.to_thread(_to_json, found), media_type="application/json")

    return Route(TRACES_PATH, get)


def _to_json(found: trace_pb2.GetTracesResponse) -> bytes:
    """Trace by trace: the encoder of JSON lets no other thread run."""
    traces = []
    for each in found.traces:
        made = MessageToDict(
            each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        traces.append(json.dumps(made, ensure_ascii=False, separators=(",", ":")))
    return f'{{"traces":[{",".join(traces)}],"missing":{json.dumps(list(found.missing))}}}'.encode()


def _flag(request: Request, name: str) -> bool:
    """Raises BatonError."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("", "0", "1", "false", "true"):
        raise invalid_field(name, f"must be true or false, not {value[:40]!r}")
    return value in ("", "1", "true")
