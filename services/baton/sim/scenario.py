"""The scenario of one simulated run, as plain data: drawn from a seed, and reduced by `shrink`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from baton.config import DecodeConfig, PrefillConfig
from baton.gateway.role_balance import RoleBounds
from baton.sim.encode import EncodeSettings
from baton.sim.faults import Fault, draw_babbles, draw_faults, draw_hangs
from baton.sim.model import ONE, POISONS, STATE, VOCAB, Windows, reference
from baton.sim.process import Machine
from baton.sim.scenario_requests import (
    RequestSpec,
    draw_request,
    draw_requests,
    draw_rest,
    poisoned,
    with_options,
)
from baton.sim.scenario_tiers import (
    PAGE_SIZE,
    Decode,
    Prefill,
    crowded,
    draw_repeated,
    draw_tiers,
    next_turns,
    with_disk,
)
from baton.sim.transport import SLOWEST_PACE

CALM_SECONDS = 12.0
"""After the last fault: time for every stream to be given up and opened again."""
PULL_SECONDS = 5.0
"""A stall of the receiver, and a large prompt pulled slowly, take longer."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    max_resumes: int
    wait: float
    """Seconds that a request waits for a decode node."""
    silence: float
    routing: Literal["cache", "least-loaded", "round-robin"] = "least-loaded"
    max_unread: int = 2048
    """Tokens that a client has not read, with which its request pauses."""
    slow_reader: float = 30.0
    """Seconds of a pause after which the request fails."""
    sources: bool = False
    """Workers are named that may lend pages of prompts."""
    auto_roles: RoleBounds | None = None
    """None: it changes no worker's role."""
    image_memory: int = 0
    """Bytes of pixels that it keeps; 0: no model here sees."""


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    windows: Windows
    """Windows of the model's KV groups, and STATE for its groups of states."""
    latency: float
    gateways: int
    gateway: GatewaySettings
    prefill: Prefill
    decode: Decode
    requests: tuple[RequestSpec, ...]
    faults: tuple[Fault, ...]
    encode: tuple[EncodeSettings, ...] = ()

    @property
    def calm(self) -> float:
        """Time when the last fault, or poisonous request, has been over for a while."""
        ends = [fault.at + fault.seconds for fault in self.faults]
        # One that ends processes without a word waits for its turn: it may do so until its deadline.
        ends += [r.at + r.timeout for r in self.requests if r.params.seed in POISONS]
        if any(machine.pull_pace == SLOWEST_PACE for _, machine in self.decode):  # overload while any lives
            ends += [request.at + request.timeout for request in self.requests if not request.probe]
        return max(ends, default=0.0) + CALM_SECONDS

    @property
    def end(self) -> float:
        """Time by which everything must have come to rest."""
        return max([self.calm, *(r.at + r.timeout for r in self.requests)]) + 15.0


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed, always the same one."""
    rng = random.Random(f"scenario {seed}")
    # In a tight scenario pages that are given back are soon another prompt's, while slow pulls still read.
    tight = rng.random() < 0.4
    ahead = random.Random(f"ahead {seed}").random() < 0.5
    windows = _windows(random.Random(f"windows {seed}"))
    decode = tuple(
        _decode(rng, tight, ahead) for _ in range(rng.choice((2, 3) if tight else (1, 1, 2, 2, 3)))
    )
    prefill = tuple(_prefill(rng, tight) for _ in range(rng.choice((1, 1, 2) if tight else (1, 2, 2, 3))))
    prefill, decode, of_ranks = _ranks(random.Random(f"ranks {seed}"), prefill, decode)
    if all(machine.ranks == 1 for _, machine in (*prefill, *decode)):  # several ranks know no states
        windows += random.Random(f"gdn {seed}").choice((*[()] * 4, (STATE,), (STATE, STATE)))
    decode = tuple((config, replace(machine, windows=windows)) for config, machine in decode)
    prefill = tuple((config, replace(machine, windows=windows)) for config, machine in prefill)
    decode = _with_drafts(random.Random(f"drafts {seed}"), decode)
    prefill, decode = draw_tiers(random.Random(f"slabs {seed}"), prefill, decode)
    disks = random.Random(f"disks {seed}")
    prefill = tuple((config, with_disk(disks, machine)) for config, machine in prefill)
    decode = tuple((config, with_disk(disks, machine)) for config, machine in decode)
    again = random.Random(f"again {seed}")
    repeated = any(machine.disk for _, machine in (*prefill, *decode)) and again.random() < 0.6
    if repeated:
        prefill, decode = crowded(again, prefill, decode)
    expiries: list[Fault] = []
    if tight:
        prefill, decode, expiries = _expiries(random.Random(f"expiry {seed}"), prefill, decode)
    gateways = rng.choice((1, 1, 2))
    room = min(config.kv_tokens for config, _ in decode)
    if repeated:
        requests = draw_repeated(again, gateways, room)
    else:
        requests = draw_requests(rng, gateways, room, tight, windows)
    requests = tuple(with_options(random.Random(f"options {seed} {r.number}"), r) for r in requests)
    if not repeated and any(machine.tier_rows for _, machine in (*prefill, *decode)):
        requests += next_turns(random.Random(f"turns {seed}"), requests, room, windows)
    names = (
        [f"p{i}" for i in range(len(prefill))],
        [f"d{i}" for i in range(len(decode))],
        [f"g{i}" for i in range(gateways)],
    )
    quiet = rng.random() < 0.1
    hangs = draw_hangs(random.Random(f"hang {seed}"), *names[:2])
    babbles = draw_babbles(random.Random(f"babble {seed}"), names[0])
    apart = [*hangs, *babbles, *expiries, *of_ranks]
    faults = () if quiet else _in_order([*draw_faults(rng, tight, *names), *apart])
    latency = rng.choice((0.0005, 0.003, 0.02))
    gateway = _gateway(random.Random(f"gateway {seed}"))
    sources = random.Random(f"sources {seed}")
    prefill, decode, gateway, lies = _sources(sources, prefill, decode, gateway)
    if gateway.sources:
        requests = _turns(sources, requests, room, windows)
    faults = _in_order([*faults, *lies]) if not quiet else faults
    requests, faults = poisoned(random.Random(f"poison {seed}"), requests, faults)
    scenario = Scenario(seed, windows, latency, gateways, gateway, prefill, decode, requests, faults)
    probes = tuple(
        draw_request(rng, len(requests) + i, scenario.calm + i * 0.05, gateways, room, [], probe=True)
        for i in range(len(decode))
    )
    readers = random.Random(f"readers {seed}")
    rested = tuple(replace(r, rests=draw_rest(readers, r)) for r in (*requests, *probes))
    return replace(scenario, requests=rested)


def _with_drafts(rng: random.Random, decode: Decode) -> Decode:
    """Every second node has none."""
    return tuple(
        (
            replace(config, draft=rng.choice(("off", "suffix")), draft_tokens=rng.choice((1, 3, 7, None))),
            machine,
        )
        for config, machine in decode
    )


def _windows(rng: random.Random) -> Windows:
    """Every second model has one group without a window, as most have."""
    if rng.random() < 0.5:
        return ONE
    a, b = rng.sample((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 20), 2)
    return rng.choice(((None, a), (None, a), (None, a, a), (None, a, b), (a,), (a, b)))


def _in_order(faults: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _gateway(rng: random.Random) -> GatewaySettings:
    return GatewaySettings(
        max_resumes=rng.choice((1, 8, 8, 8)),
        wait=rng.choice((1.0, 30.0)),
        silence=rng.choice((1.0, 2.0, 4.0)),
        routing=rng.choice(("least-loaded", "least-loaded", "cache", "round-robin")),
        max_unread=rng.choice((1, 3, 2048)),
        slow_reader=rng.choice((0.5, 30.0, 30.0)),
    )


def _worker(rng: random.Random, pages: int) -> dict[str, Any]:
    """Options that both kinds of worker have."""
    return {
        "kv_tokens": pages * PAGE_SIZE,
        "page_size": PAGE_SIZE,
        "max_waiting": 64,
        "max_rows": rng.randrange(3, 9),
        "token_budget": rng.choice((8, 16, 32)),
        "overlap": rng.random() < 0.5,
        "policy": rng.choice(("fcfs", "fcfs", "lpm")),
        "eviction": rng.choice(("lru", "lru", "lfu", "fifo", "mru")),
    }


def _step_seconds(rng: random.Random) -> float:
    return rng.choice((0.002, 0.01, 0.05))


def _prefill(rng: random.Random, tight: bool) -> tuple[PrefillConfig, Machine]:
    pages = rng.randrange(8, 14) if tight else rng.choice((rng.randrange(8, 16), rng.randrange(12, 40)))
    worker = _worker(rng, pages)
    if tight:
        worker["token_budget"] = rng.choice((8, 16, 24))
    config = PrefillConfig(
        **worker,
        lease_grace_seconds=rng.choice((1.0, 1.0, 3.0)),
        max_leased_fraction=rng.choice((0.3, 0.8)),
        transports=("shm",) if rng.random() < (0.8 if tight else 0.5) else ("grpc",),
    )
    return config, Machine(_step_seconds(rng))


def _decode(rng: random.Random, tight: bool, ahead: bool) -> tuple[DecodeConfig, Machine]:
    pages = rng.randrange(12, 40)
    config = DecodeConfig(
        **_worker(rng, pages),
        local_prefill_tokens=rng.choice((0, 3, 3, 8)),
        fallback_tokens=rng.choice((8, 64)),
        handoff_seconds=rng.choice((1.0, 4.0)),
        pull_seconds=PULL_SECONDS,
        output_margin=rng.choice((0, 2, 4, 8)),
        watermark=rng.choice((0.0, 0.06, 0.1)),
        message_seconds=rng.choice((0.0, 0.005)),
    )
    pace = rng.choice((*((0.005, 0.02, 0.1) if tight else (0.0002, 0.002, 0.02)), SLOWEST_PACE))
    return config, Machine(_step_seconds(rng), pace, sees_steps=ahead)


Workers = tuple[Prefill, Decode, list[Fault]]


def _ranks(
    rng: random.Random,
    prefill: Prefill,
    decode: Decode,
) -> Workers:
    """Every third deployment has workers of several ranks, each its own number. Also their faults."""
    if rng.random() < 2 / 3:
        return prefill, decode, []
    heads, limit = rng.choice((1, 2, 2, 4)), rng.choice((0.5, 1.0, 3.0))

    def ranked(machine: Machine) -> Machine:
        return replace(machine, heads=heads, ranks=rng.choice((1, 2, 2, 4)), collective_seconds=limit)

    prefill = tuple((config, ranked(machine)) for config, machine in prefill)
    decode = tuple((config, ranked(machine)) for config, machine in decode)
    machines = {f"p{i}": machine for i, (_, machine) in enumerate(prefill)}
    machines |= {f"d{i}": machine for i, (_, machine) in enumerate(decode)}
    several = [name for name, machine in machines.items() if machine.ranks > 1]
    faults = [
        Fault(
            at=rng.uniform(0.9, rng.choice((1.5, 3.0, 6.0))),
            kind=rng.choice(("kill-rank", "stall-rank", "stall-rank")),
            target=rng.choice(several),
            seconds=rng.choice((0.02, 0.2, limit, 4.0)) * rng.uniform(0.5, 1.5),
            value=rng.randrange(4),
        )
        for _ in range(rng.choice((0, 0, 1, 3, 6)) if several else 0)
    ]
    return prefill, decode, faults


def _sources(
    rng: random.Random,
    prefill: Prefill,
    decode: Decode,
    gateway: GatewaySettings,
) -> tuple[
    Prefill,
    Decode,
    GatewaySettings,
    list[Fault],
]:
    """In every second deployment workers pull each other's cached pages, by any transport and at any pace; in
    some of these, workers lend pages of other prompts."""
    if rng.random() < 0.5:
        return prefill, decode, gateway, []
    pace = rng.choice((0.0002, 0.002, 0.02, 0.1))
    prefill = tuple((config, replace(machine, pull_pace=pace)) for config, machine in prefill)
    decode = tuple(
        (replace(config, transports=rng.choice((("shm",), ("grpc",)))), machine) for config, machine in decode
    )
    names = [f"p{i}" for i in range(len(prefill))] + [f"d{i}" for i in range(len(decode))]
    lies = [
        Fault(rng.uniform(0.9, 2.0), "lie", rng.choice(names), "", rng.choice((1.0, 8.0)))
        for _ in range(rng.choice((0, 0, 2, 4)))
    ]
    return prefill, decode, replace(gateway, sources=True), lies


def _turns(
    rng: random.Random, requests: tuple[RequestSpec, ...], room: int, windows: Windows
) -> tuple[RequestSpec, ...]:
    """Many requests are the next turn of an earlier one."""
    found: list[RequestSpec] = []
    for spec in requests:
        if found and not spec.stop and rng.random() < 0.6:
            before = rng.choice(found)
            params = before.params
            output: tuple[int, ...] = ()
            if params.grammar is None and not params.penalized:
                output = reference(before.prompt, params.seed, params.max_tokens, windows=windows)
            more = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9)))
            prompt = (*before.prompt, *output, *more)[: room - spec.params.max_tokens]
            spec = replace(spec, prompt=prompt, namespace=before.namespace)
        found.append(spec)
    return tuple(found)


def _expiries(
    rng: random.Random,
    prefill: Prefill,
    decode: Decode,
) -> Workers:
    """Where pages are asked for, only the answer to the release says whether they are those that were
    announced. In three of four such scenarios leases run out while a copy stands still; their ends are told
    to the holder about when the copy goes on, over a stream that seldom breaks meanwhile."""
    asked = [i for i, (config, _) in enumerate(prefill) if config.transports == ("grpc",)]
    if not asked or rng.random() < 0.25:
        return prefill, decode, []
    prefill = tuple((replace(config, lease_grace_seconds=1.0), machine) for config, machine in prefill)
    decode = tuple(
        (replace(config, handoff_seconds=4.0), replace(machine, pull_pace=max(0.1, machine.pull_pace)))
        for config, machine in decode
    )
    faults = []
    for _ in range(rng.choice((4, 8))):
        owner, holder = f"p{rng.choice(asked)}", f"d{rng.randrange(len(decode))}"
        at, seconds = rng.uniform(1.2, 6.0), rng.uniform(1.05, 1.5)
        faults.append(Fault(at, "cut", holder, owner, seconds))
        faults.append(Fault(at + rng.uniform(-0.1, 0.1), "stall", holder, "", seconds + 0.2, 2))
    return prefill, decode, faults
