"""A server of the Model Context Protocol (stdio) with one tool, for agents.

Its argument: a file that calls are noted in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """None: a method that it does not know."""
    if method == "initialize":
        named = {"name": "weather", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": named,
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        with Path(sys.argv[1]).open("a") as calls:
            calls.write(json.dumps(params["arguments"]) + "\n")
        return {"content": [{"type": "text", "text": f"sunny in {params['arguments']['city']}"}]}
    return {} if method == "ping" else None


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        unknown = {"code": -32601, "message": f"no method {message['method']}"}
        outcome = {"error": unknown} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
