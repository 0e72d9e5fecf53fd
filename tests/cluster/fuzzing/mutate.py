"""Bytes that were good once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random

from fuzzing.cases import FOR_FRIENDS, HELLO, HTTP, RAW, Case, Method
from fuzzing.h2 import PREFACE, frame
from fuzzing.seeds import BODIES, SEEDS

EDGES = (b"\x00", b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\x7f", b"\xff\xff\xff\xff\x0f", b"\xed\xa0\x80")


def mutated(rng: Random) -> Iterator[Case]:
    """Cases without end."""
    while True:
        kind = rng.random()
        if kind < 0.75:
            yield call(rng, FOR_FRIENDS)
        elif kind < 0.9:
            yield _body(rng)
        else:
            yield connection(rng)


def break_bytes(data: bytes, rng: Random) -> bytes:
    """One to four changes: bits, bytes, cuts, repetitions, and integers at their edges."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(broken) + 1)
        end = min(len(broken), at + rng.randint(1, 8))
        change = rng.randrange(7)
        if change == 0 and at < len(broken):
            broken[at] ^= 1 << rng.randrange(8)
        elif change == 1 and at < len(broken):
            broken[at] = rng.randrange(256)
        elif change == 2:
            del broken[at:end]
        elif change == 3:
            broken[at:at] = broken[at:end]
        elif change == 4:
            broken[at:end] = rng.choice(EDGES)
        elif change == 5:
            broken[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            del broken[at:]
    return bytes(broken)


def call(rng: Random, methods: Sequence[Method], broken: float = 0.6, way: str = "") -> Case:
    """broken: how much of what is sent."""
    method = rng.choice(methods)
    seeds = [seed.SerializeToString() for seed in SEEDS[method.path]]
    count = rng.randint(1, 12) if method.stream else 1
    sent = [rng.choice(seeds) for _ in range(count)]
    sent = [break_bytes(data, rng) if rng.random() < broken else data for data in sent]
    if method.hello and rng.random() < 0.9:
        sent.insert(0, HELLO)
    return Case(rng.choice(method.targets), tuple(sent), way)


def _body(rng: Random) -> Case:
    path = rng.choice(HTTP)
    return Case(path, (break_bytes(json.dumps(rng.choice(BODIES[path])).encode(), rng),))


def connection(rng: Random) -> Case:
    """Anything on a bare connection: HTTP/1.1 that is wrong, HTTP/2 frames that are, or noise."""
    where = rng.choice(RAW)
    if rng.random() < 0.2:
        return Case(f"raw {where}", (rng.randbytes(rng.randint(1, 300)),))
    if where == "http":
        body = json.dumps(BODIES["/v1/completions"][0]).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        return Case("raw http", (break_bytes(head + length + body, rng),))
    frames = [frame(4, 0, 0, b"")]
    for _ in range(rng.randint(1, 8)):
        stream = rng.choice((0, 1, 1, 3, 2**31 - 1))
        frames.append(frame(rng.randrange(12), rng.randrange(256), stream, rng.randbytes(rng.randint(0, 40))))
    if rng.random() < 0.5:
        frames[-1] = break_bytes(frames[-1], rng)
    preface = PREFACE if rng.random() < 0.9 else break_bytes(PREFACE, rng)
    return Case(f"raw {where}", (preface, *frames))
