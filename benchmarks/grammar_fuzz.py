"""Hostile grammars and tools, from many clients at once, while clients leave and decode nodes die.

    python benchmarks/grammar_fuzz.py --seconds 240 --json benchmarks/results/grammar_fuzz.json

Deep, recursive, huge, contradictory and mutated JSON Schemas, regular expressions and Lark grammars that grow
without bound, beside random schemas that can be followed. A third of the requests are given up after a random
time. --kill: a decode node is killed and started again so often. It is a problem if a request does not end in
time, fails with another error than is due, or ends with an answer that does not fit; if a process ends by
itself, logs a traceback, or holds anything at the end. What processes hold in memory is told of the middle
and of the end. The exit code is 1 if there was a problem.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

import grpc
import jsonschema
import psutil
from deployment import Deployment
from rich.console import Console
from shared import make_parser, save_results

from baton.client import AsyncClient, BatonError, Completion
from random_schemas import random_schema

DUE = {
    grpc.StatusCode.INVALID_ARGUMENT,  # it cannot be compiled
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # too many wait to be compiled
}
LATE = "GRAMMAR_FAILED"
"""The reason of a grammar that is found to be too large in the middle of an answer."""
SECONDS = 90.0
"""A request must have ended by then."""


def grammar(rng: Random) -> tuple[str, dict[str, Any]]:
    """A kind of hostility, and a grammar as a client takes it."""
    kind = rng.choice(list(KINDS))
    return kind, KINDS[kind](rng)


def _deep(rng: Random) -> dict[str, Any]:
    depth = rng.choice((20, 110, 130, 1_000, 20_000))
    head, tail = rng.choice((('{"items":', "}"), ('{"properties":{"a":', "}}"), ('{"anyOf":[', "]}")))
    return {"json_schema": head * depth + "{}" + tail * depth}


def _recursive(rng: Random) -> dict[str, Any]:
    names = [f"d{i}" for i in range(rng.randint(1, 12))]

    def one() -> dict[str, Any]:
        to = {"$ref": f"#/$defs/{rng.choice(names)}"}
        kinds = (
            to,
            {"type": "array", "items": to, "minItems": rng.randint(0, 3)},
            {"type": "object", "properties": {"x": to}, "required": rng.choice(([], ["x"]))},
            {"anyOf": [to, {"$ref": f"#/$defs/{rng.choice(names)}"}]},
        )
        return rng.choice(kinds)

    return {"json_schema": {"$defs": {name: one() for name in names}, **one()}}


def _huge(rng: Random) -> dict[str, Any]:
    count = rng.choice((300, 600, 3_000))
    properties = {f"{rng.random()}": rng.choice(({}, {"type": "string"})) for _ in range(count)}
    enum = [rng.randbytes(rng.randint(1, 60)).hex() for _ in range(count)]
    kinds: tuple[dict[str, Any], ...] = (
        {"enum": enum},
        {"type": "object", "properties": properties},
        {"type": "string", "minLength": 10 ** rng.randint(2, 9)},
        {"type": "array", "minItems": 10 ** rng.randint(2, 9)},
        {"type": "string", "pattern": f"^([a-z]{{1,{count}}}){{1,{count}}}$"},
    )
    return {"json_schema": rng.choice(kinds)}


def _contradictory(rng: Random) -> dict[str, Any]:
    parts = [random_schema(rng.randrange(10**6)) for _ in range(rng.randint(2, 4))]
    product = [{"anyOf": [{"required": [f"{i}.{j}"]} for j in range(3)]} for i in range(rng.randint(2, 14))]
    return {"json_schema": {"allOf": rng.choice((parts, product))}}


def _regex(rng: Random) -> dict[str, Any]:
    text = rng.choice(("a", "[^x]", "(a|b)", "."))
    for _ in range(rng.randint(1, 6)):
        most = rng.choice((3, 30, 300))
        text = rng.choice((f"({text}){{1,{most}}}", f"({text})*{text}", f"({text}|{text}x)+", f"(.*{text})"))
    return {"regex": text}


def _lark(rng: Random) -> dict[str, Any]:
    names = [f"r{i}" for i in range(rng.randint(1, 40))]
    rules = [f"start: {rng.choice(names)}"]
    for name in names:
        parts = [
            rng.choice((rng.choice(names), '"a"', "/[ab]+/", f"({rng.choice(names)})*")) for _ in range(3)
        ]
        rules.append(f"{name}: {rng.choice((' ', ' | ')).join(parts)}")
    return {"lark": "\n".join(rules)}


def _mutated(rng: Random) -> dict[str, Any]:
    raw = bytearray(json.dumps(random_schema(rng.randrange(10**6))).encode())
    for _ in range(rng.randint(1, 8)):
        raw[rng.randrange(len(raw))] = rng.choice(b'{}[]",:0ae$\\')
    return {"json_schema": raw.decode(errors="replace")}


def _followed(rng: Random) -> dict[str, Any]:
    return {"json_schema": random_schema(rng.randrange(40))}


KINDS = {
    "deep": _deep,
    "recursive": _recursive,
    "huge": _huge,
    "contradictory": _contradictory,
    "regex": _regex,
    "lark": _lark,
    "mutated": _mutated,
    "can be followed": _followed,
}


@dataclass
class Found:
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: float = 0.0
    kills: int = 0


async def ask(client: AsyncClient, rng: Random, found: Found) -> None:
    kind, own = grammar(rng)
    what = f"{kind}: {json.dumps(own)[:300]}"
    request: dict[str, Any] = {"prompt": f"{rng.random()} " * rng.randint(1, 30), "grammar": own}
    request |= {"max_tokens": rng.randint(1, 120), "temperature": 1.5, "n": rng.choice((1, 1, 3))}
    leaves = rng.choice((None, None, rng.expovariate(1.0)))
    began = time.monotonic()
    try:
        async with asyncio.timeout(SECONDS if leaves is None else leaves):
            answer = await client.generate(**request)
    except TimeoutError:
        if leaves is None:
            found.problems.append(f"did not end in {SECONDS:.0f} s: {what}")
        found.outcomes["left"] += 1
        return
    except BatonError as error:
        code = error.code.name if error.code is not None else "?"
        due = error.code in DUE or error.reason == LATE
        found.outcomes[LATE if error.reason == LATE else code] += 1
        if kind == "can be followed" and error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            due = False
        if not due or "\n" in error.message:
            found.problems.append(f"{code} {error.reason} {error.message[:200]}: {what}")
        return
    found.slowest = max(found.slowest, time.monotonic() - began)
    found.outcomes["answered"] += 1
    if kind == "can be followed":
        check(answer, own["json_schema"], found)


def check(answer: Completion, schema: dict[str, Any], found: Found) -> None:
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            try:
                jsonschema.validate(json.loads(choice.text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                found.problems.append(f"an answer that does not fit: {choice.text[:200]}: {error}"[:500])


async def storm(deployment: Deployment, args: Any, rng: Random, found: Found) -> None:
    """For half of the time."""
    ends = time.monotonic() + args.seconds / 2

    async def one(client: AsyncClient, own: Random) -> None:
        while time.monotonic() < ends:
            await ask(client, own, found)

    async def kill() -> None:
        nodes = deployment.of("decode")
        while args.kill and time.monotonic() + args.kill + 20 < ends:
            await asyncio.sleep(args.kill)
            node = nodes[found.kills % len(nodes)]
            node.kill()
            found.kills += 1
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(node.wait_ready)
            await asyncio.sleep(5)  # the gateway sees it before the next one dies

    async with AsyncClient(deployment.gateway.address) as client:
        streams = (one(client, Random(rng.getrandbits(64))) for _ in range(args.clients))
        await asyncio.gather(*streams, kill())


def memory(deployment: Deployment) -> dict[str, float]:
    """MiB of each process."""
    return {
        process.name: round(psutil.Process(process.pid).memory_info().rss / 2**20, 1)
        for process in deployment.processes
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kill", type=float, default=20.0, help="seconds between kills; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console, rng, found = Console(), Random(args.seed), Found()
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment.split(Path(folder), "demo", decode=2) as deployment,
    ):
        memories = []
        for _ in range(2):
            asyncio.run(storm(deployment, args, rng, found))
            memories.append(memory(deployment))
        deployment.assert_idle(10.0)
        for process in deployment.processes:
            if "Traceback" in process.log.read_text():
                found.problems.append(f"a traceback in {process.log}: {process.tail()}")
    figures = {
        "outcomes": dict(found.outcomes),
        "kills": found.kills,
        "slowest answer, s": round(found.slowest, 1),
        "MiB in the middle": memories[0],
        "MiB at the end": memories[1],
        "problems": found.problems[:40],
    }
    console.print_json(json.dumps(figures))
    save_results(args, {"figures": figures})
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
