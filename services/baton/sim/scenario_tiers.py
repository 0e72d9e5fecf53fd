"""Host tiers and disks of a simulated deployment, and the requests that need them, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from baton.config import DecodeConfig, PrefillConfig
from baton.sim.model import VOCAB, Windows, reference
from baton.sim.process import Machine
from baton.sim.scenario_requests import RequestSpec, draw_request

PAGE_SIZE = 4
REPEATED = "repeated"
"""The disk of a deployment whose prompts come again and again."""
Prefill = tuple[tuple[PrefillConfig, Machine], ...]
Decode = tuple[tuple[DecodeConfig, Machine], ...]


def draw_tiers(rng: random.Random, prefill: Prefill, decode: Decode) -> tuple[Prefill, Decode]:
    """Every third deployment has nodes with a host tier, often one smaller than the pool, and small pools."""
    if rng.random() < 0.65:
        return prefill, decode
    pace = rng.choice((0.0002, 0.002, 0.02, 0.1, 0.1))

    def tiered(machine: Machine) -> Machine:
        rows = rng.choice((0, rng.randrange(4, 10), rng.randrange(4, 10), rng.randrange(10, 60)))
        return replace(machine, tier_rows=rows, tier_pace=pace)

    pages = rng.randrange(8, 14)
    small = (replace(config, kv_tokens=min(config.kv_tokens, pages * PAGE_SIZE)) for config, _ in prefill)
    prefill = tuple((config, tiered(machine)) for config, (_, machine) in zip(small, prefill, strict=True))
    return prefill, tuple((config, tiered(machine)) for config, machine in decode)


def with_disk(rng: random.Random, machine: Machine) -> Machine:
    """Two of three nodes with a host tier have a disk, some the same one."""
    disk = rng.choice(("", "shared", f"{rng.getrandbits(32):x}"))
    return replace(machine, disk=disk) if machine.tier_rows else machine


def next_turns(
    rng: random.Random, requests: tuple[RequestSpec, ...], room: int, windows: Windows
) -> tuple[RequestSpec, ...]:
    """The next turns of conversations, when others have had pages in between; a tier may have theirs."""
    turns: list[RequestSpec] = []
    after = requests[-1].at - requests[0].at + rng.choice((0.5, 2.0))
    last = list(requests[: rng.randrange(4, 12)])
    for _ in range(rng.choice((1, 2))):
        for index, spec in enumerate(last):
            more: tuple[int, ...] = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6)))
            if rng.random() < 0.5:
                more = (
                    *reference(spec.prompt, spec.params.seed, spec.params.max_tokens, windows=windows),
                    *more,
                )
            prompt = (*spec.prompt, *more)[: room - spec.params.max_tokens]
            number = len(requests) + len(turns)
            turn = replace(spec, number=number, at=spec.at + after, prompt=prompt, stop=(), cancel_after=None)
            turns.append(turn)
            last[index] = turn
    return tuple(turns)


def crowded(rng: random.Random, prefill: Prefill, decode: Decode) -> tuple[Prefill, Decode]:
    """Few nodes share a disk, from which their small pools and host tiers read again and again."""
    prefill, decode = prefill[:1], decode[: rng.choice((1, 2))]
    pace = rng.choice((0.0002, 0.002, 0.02))

    def machine(before: Machine) -> Machine:
        return replace(before, disk=REPEATED, tier_rows=rng.randrange(6, 9), tier_pace=pace, ranks=1)

    tokens = PAGE_SIZE * rng.randrange(9, 12)
    return (
        tuple((replace(config, kv_tokens=tokens), machine(before)) for config, before in prefill),
        tuple((replace(config, kv_tokens=tokens), machine(before)) for config, before in decode),
    )


def draw_repeated(rng: random.Random, gateways: int, room: int) -> tuple[RequestSpec, ...]:
    """Few prompts again and again, more than a pool and a host tier have room for; some in two namespaces."""
    first = tuple(rng.randrange(VOCAB) for _ in range(PAGE_SIZE))
    prompts = [
        (rng.choice((first, ())) + tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(12, 24))))
        for _ in range(rng.randrange(3, 7))
    ]
    at, gap, requests = 1.0, rng.choice((0.03, 0.1, 0.3)), []
    for number in range(rng.randrange(24, 44)):
        at += rng.expovariate(1 / gap)
        spec = draw_request(rng, number, at, gateways, room, prompts)
        if rng.random() < 0.7:
            spec = replace(spec, prompt=rng.choice(prompts)[: room - spec.params.max_tokens])
        requests.append(replace(spec, namespace=rng.choice(("", "", "another"))))
    return tuple(requests)
