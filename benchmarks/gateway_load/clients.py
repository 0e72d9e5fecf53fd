"""Clients in a closed loop: each sends its next request as soon as its answer is complete.

    python -m gateway_load.clients grpc 127.0.0.1:50050 --streams 64 --seconds 10

Each client has a stream of its own; connections are shared. Prints "begin" and "end" around the measurement,
and its counts as one line of JSON: messages with tokens, and tokens. Every token is one character of text,
so that the text shows their number. An incomplete answer ends the program. No client library is used,
because its cost would be measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter

from baton.rpc.node import run_process
from baton.v1 import inference_pb2
from gateway_load.wire import Connection

CONNECTIONS = 8
LOOK_SECONDS = 0.005
"""Interval at which gRPC clients read messages."""
PROMPT = tuple(range(5, 21))


async def ask_grpc(address: str, streams: int, max_tokens: int, counts: Counter[str]) -> None:
    """`streams` clients over one connection."""
    start = inference_pb2.GenerateStart(id="r", tokens=inference_pb2.TokenPrompt(token_ids=PROMPT))
    start.sampling.max_tokens = max_tokens
    start.sampling.ignore_eos = True
    request = inference_pb2.GenerateRequest(start=start).SerializeToString()
    connection = Connection(address, "/baton.v1.Inference/Generate")
    got = {connection.open(): 0 for _ in range(streams)}
    for stream in got:
        connection.send(stream, request)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for stream, message in connection.receive():
            event = inference_pb2.GenerateResponse.FromString(message)
            kind = event.WhichOneof("kind")
            if kind == "delta":
                size = len(event.delta.token_ids)
                if len(event.delta.text) != size:
                    raise RuntimeError(f"{size} tokens with the text {event.delta.text!r}")
                got[stream] += size
                counts["messages"] += 1
                counts["tokens"] += size
            elif kind == "finished":
                if got[stream] != max_tokens:
                    raise RuntimeError(f"an answer of {got[stream]} tokens, not {max_tokens}")
                counts["answers"] += 1
                got[stream] = 0
                connection.send(stream, request)
            elif kind != "accepted":
                raise RuntimeError(f"the gateway answered {event}")


async def ask_http(address: str, max_tokens: int, counts: Counter[str]) -> None:
    """Reads server-sent events."""
    host, _, port = address.rpartition(":")
    body = {"model": "source", "prompt": PROMPT, "max_tokens": max_tokens, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    while True:
        writer.write(head.encode() + content)
        got = 0
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if not line.startswith(b"data: "):
                if not line:
                    raise RuntimeError("the gateway closed the connection")
                continue
            size = sum(len(choice["text"]) for choice in json.loads(line[6:])["choices"])
            got += size
            counts["messages"] += size > 0
            counts["tokens"] += size
        if got != max_tokens:
            raise RuntimeError(f"an answer of {got} tokens, not {max_tokens}")
        while await reader.readline() != b"0\r\n":
            pass
        await reader.readline()
        counts["answers"] += 1


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("api", choices=("grpc", "http"))
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-seconds", type=float, default=2.0)
    parser.add_argument("--max-tokens", type=int, default=500)
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    if args.api == "grpc":
        shares = [len(range(i, args.streams, CONNECTIONS)) for i in range(CONNECTIONS)]
        asking = [ask_grpc(args.address, share, args.max_tokens, counts) for share in shares if share]
    else:
        asking = [ask_http(args.address, args.max_tokens, counts) for _ in range(args.streams)]

    async def measure() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(args.warm_seconds)
        before, began = counts.copy(), loop.time()
        print("begin", flush=True)
        await asyncio.sleep(args.seconds)
        seconds = loop.time() - began
        found = {name: counts[name] - before[name] for name in ("messages", "tokens", "answers")}
        print("end", json.dumps({"seconds": seconds, **found}), flush=True)

    tasks = [asyncio.create_task(ask) for ask in asking]
    measuring = asyncio.create_task(measure())
    done, _ = await asyncio.wait([measuring, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_process(main()))
