"""The requests of a simulated run, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from baton.engine.sampling_params import SamplingParams
from baton.rpc.validate import MAX_STOP_TOKENS
from baton.sim.faults import Fault
from baton.sim.grammar import SPEC
from baton.sim.images import SimImage
from baton.sim.model import POISON, SILENT_POISON, VOCAB, Windows, reference


@dataclass(frozen=True, slots=True)
class RequestSpec:
    number: int
    """Counts the requests of a scenario."""
    at: float
    gateway: int
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int
    priority: int
    timeout: float
    stop: tuple[str, ...] = ()
    """Stop strings, which the gateway looks for."""
    cancel_after: float | None = None
    """The client cancels or leaves this many seconds after its request."""
    probe: bool = False
    """Sent when all faults are over: it must finish."""
    namespace: str = ""
    resume: bool = True
    """The client prefers a resume to an error."""
    images: tuple[tuple[int, SimImage], ...] = ()
    """Images in the prompt, with where they begin; the prompt has what the model takes for their tokens."""
    rests: float = 0.0
    """Seconds that the client reads nothing once there is output."""


def draw_rest(rng: random.Random, spec: RequestSpec) -> float:
    """Every third client stops reading for a while, but for a moment only where its request is to finish."""
    seconds = rng.choice((0.0, 0.0, rng.uniform(0.1, 2.0)))
    return min(seconds, 0.1) if spec.probe else seconds


def poisoned(
    rng: random.Random, requests: tuple[RequestSpec, ...], faults: tuple[Fault, ...]
) -> tuple[tuple[RequestSpec, ...], tuple[Fault, ...]]:
    """Now and then a request ends the processes that compute it; other faults are few then, for what is to
    become of the others to be known."""
    seed = POISON if rng.random() >= 0.9 else SILENT_POISON
    if seed == SILENT_POISON and rng.random() < 0.8:
        return requests, faults
    chosen = rng.randrange(len(requests))
    spec = requests[chosen]
    params = replace(spec.params, seed=seed)
    # A short prompt is computed by decode nodes, which end one after the other.
    prompt = spec.prompt[: rng.choice((2, len(spec.prompt)))]
    poison = replace(
        spec, prompt=prompt, params=params, n=1, stop=(), timeout=15.0, cancel_after=None, resume=True
    )
    return (*requests[:chosen], poison, *requests[chosen + 1 :]), faults[: rng.choice((0, 0, 1, 3))]


def draw_requests(
    rng: random.Random, gateways: int, room: int, tight: bool, windows: Windows
) -> tuple[RequestSpec, ...]:
    prefixes = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))) for _ in range(3)]
    gap = rng.choice((0.1, 0.2, 0.4) if tight else (0.0, 0.02, 0.2, 0.5))
    count = rng.randrange(12, 30) if tight else rng.choice((rng.randrange(2, 8), rng.randrange(6, 24)))
    at, requests = 1.0, []
    for number in range(count):
        at += rng.expovariate(1 / gap) if gap else 0.0
        spec = draw_request(rng, number, at, gateways, room, [] if tight else prefixes, tight)
        if not tight and spec.n == 1 and spec.params.seed % 4 == 0:
            output = reference(spec.prompt, spec.params.seed, spec.params.max_tokens, windows=windows)
            spec = replace(spec, stop=(f" {output[spec.params.seed % len(output)]} ",))
        requests.append(spec)
        if spec.n == 1 and not spec.params.stop_token_ids:
            # A session's next turn begins with all of this one.
            output = reference(spec.prompt, spec.params.seed, spec.params.max_tokens, windows=windows)
            prefixes.append((*spec.prompt, *output))
    return tuple(requests)


def with_options(rng: random.Random, spec: RequestSpec) -> RequestSpec:
    """Options that need a state of the device, or another prefix of the same tokens."""
    spec = replace(spec, namespace=rng.choice(("", "", "another")))
    if rng.random() < 0.3 and not spec.stop:
        spec = replace(spec, params=replace(spec.params, frequency_penalty=1.0))
    if rng.random() < 0.2:
        spec = replace(spec, params=replace(spec.params, prompt_logprobs=0))
    if spec.params.seed % 5 == 0 and not spec.stop and not spec.params.stop_token_ids:
        spec = replace(spec, params=replace(spec.params, grammar=SPEC))
    return spec


def draw_request(
    rng: random.Random,
    number: int,
    at: float,
    gateways: int,
    room: int,
    prefixes: list[tuple[int, ...]],
    tight: bool = False,
    probe: bool = False,
) -> RequestSpec:
    max_tokens = rng.choice((1, 2, 5, 10, rng.randrange(1, 16)))
    prompt = rng.choice(prefixes) if prefixes else ()
    more = rng.randrange(12, 33) if tight else rng.randrange(0 if prompt else 1, 12)
    prompt += tuple(rng.randrange(VOCAB) for _ in range(more))
    n = rng.choice((1, 1, 1, 1, 2, 3))
    stop = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 0, MAX_STOP_TOKENS))))
    params = SamplingParams(max_tokens=max_tokens, seed=rng.getrandbits(64), stop_token_ids=stop)
    return RequestSpec(
        number=number,
        at=at,
        gateway=rng.randrange(gateways),
        prompt=prompt[: room - max_tokens],
        params=params,
        n=1 if probe else n,
        priority=rng.randrange(3),
        timeout=60.0 if probe else rng.choice((6.0, 15.0) if tight else (0.3, 2.0, 6.0, 15.0)),
        cancel_after=None if probe or rng.random() > 0.15 else rng.uniform(0.0, 1.0),
        probe=probe,
        resume=probe or params.seed % 8 != 1,
    )
