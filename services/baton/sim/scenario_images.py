"""Scenarios of a model that sees: images in prompts, encode nodes and their deaths, tiny caches, among all
other faults."""

from __future__ import annotations

import random
from dataclasses import replace

from baton.sim.encode import EncodeSettings
from baton.sim.faults import Fault
from baton.sim.images import SIDE, SimImage
from baton.sim.model import POISONS, VOCAB, Windows, reference
from baton.sim.process import ImageSettings
from baton.sim.scenario import Scenario, make_scenario
from baton.sim.scenario_requests import RequestSpec

MOST_ROWS, MOST_COLUMNS = 3, 4
TOKEN_BYTES = 3 * SIDE**2
LARGEST = MOST_ROWS * MOST_COLUMNS * TOKEN_BYTES
"""Bytes of an image's pixels."""


def make_image_scenario(seed: int) -> Scenario:
    """The scenario of the seed with a model that sees; always the same one. No worker has several ranks, and
    none lends pages of other prompts: what it would lend is drawn from keys without images."""
    scenario, rng = make_scenario(seed), random.Random(f"images {seed}")
    images = _draw_images(rng)
    room = min(config.kv_tokens for config, _ in scenario.decode)
    memory = LARGEST * rng.choice((4, 8, 60))
    requests: list[RequestSpec] = []
    for spec in scenario.requests:
        few = spec.params.seed in POISONS or (spec.probe and memory < 60 * LARGEST)
        requests.append(spec if few else _with_images(rng, spec, requests, images, room, scenario.windows))
    need = max(sum(len(image.tokens) for _, image in spec.images) for spec in requests) * TOKEN_BYTES
    sees = ImageSettings(
        room=max(need, LARGEST) * rng.choice((1, 1, 3)),
        cached=rng.choice((0, 150, 10**6)),
        here=rng.choice((0.0, 0.0, 0.3, 1.0)),
        pull_pace=rng.choice((0.0002, 0.002, 0.02, 0.1)),
    )
    encode = tuple(_encode_node(rng) for _ in range(rng.choice((0, 1, 1, 2, 2))))
    faults = [fault for fault in scenario.faults if fault.kind not in ("lie", "kill-rank", "stall-rank")]
    if scenario.faults:
        faults += _faults(rng, scenario, len(encode))
    return replace(
        scenario,
        gateway=replace(scenario.gateway, image_memory=memory),
        prefill=tuple((c, replace(m, ranks=1, images=sees)) for c, m in scenario.prefill),
        decode=tuple((c, replace(m, ranks=1, images=sees)) for c, m in scenario.decode),
        requests=tuple(requests),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        encode=encode,
    )


def _draw_images(rng: random.Random) -> list[SimImage]:
    """A few, some of them of one size."""
    found: list[SimImage] = []
    for number in range(rng.randrange(2, 7)):
        size = rng.randrange(1, MOST_ROWS + 1), rng.randrange(1, MOST_COLUMNS + 1)
        if found and rng.random() < 0.5:
            size = found[-1].rows, found[-1].columns
        found.append(SimImage(number, *size))
    return found


def _with_images(
    rng: random.Random,
    spec: RequestSpec,
    earlier: list[RequestSpec],
    images: list[SimImage],
    room: int,
    windows: Windows,
) -> RequestSpec:
    """Texts and images, or the next turn of an earlier request."""
    most = room - spec.params.max_tokens
    alike = [each for each in earlier if each.images and len(each.prompt) <= most]
    if alike and rng.random() < 0.2:
        return _with_another(rng, spec, rng.choice(alike), images)
    prompt: tuple[int, ...] = ()
    placed: tuple[tuple[int, SimImage], ...] = ()
    if earlier and rng.random() < 0.5:
        before = rng.choice(earlier)
        params = before.params
        if len(before.prompt) + params.max_tokens < most:
            prompt, placed = before.prompt, before.images
            if params.grammar is None and not params.penalized:
                prompt += reference(prompt, params.seed, params.max_tokens, windows=windows)
            spec = replace(spec, namespace=before.namespace)
    for _ in range(rng.choice((1, 1, 2, 3))):
        prompt += tuple(rng.randrange(VOCAB) for _ in range(min(rng.randrange(7), most - len(prompt))))
        image = rng.choice(images)
        if rng.random() < 0.8 and len(prompt) + len(image.tokens) <= most:
            placed += ((len(prompt), image),)
            prompt += image.tokens
    if len(prompt) < most and (rng.random() < 0.7 or not prompt):
        prompt += (rng.randrange(VOCAB),)
    params = replace(spec.params, prompt_logprobs=None) if placed else spec.params
    return replace(spec, prompt=prompt, images=placed, params=params, stop=())


def _with_another(
    rng: random.Random, spec: RequestSpec, before: RequestSpec, images: list[SimImage]
) -> RequestSpec:
    """The prompt of an earlier request, in which one image is another one of the same size."""
    at = rng.randrange(len(before.images))
    start, old = before.images[at]
    new = rng.choice([each for each in images if (each.rows, each.columns) == (old.rows, old.columns)])
    prompt = (*before.prompt[:start], *new.tokens, *before.prompt[start + len(old.tokens) :])
    placed = (*before.images[:at], (start, new), *before.images[at + 1 :])
    params = replace(spec.params, prompt_logprobs=None)
    return replace(spec, prompt=prompt, images=placed, params=params, stop=(), namespace=before.namespace)


def _encode_node(rng: random.Random) -> EncodeSettings:
    return EncodeSettings(
        pages=rng.choice((2, 3, 4, 6, 12)),
        room=LARGEST * rng.choice((1, 2, 8)),
        shared=rng.random() < 0.5,
        batch_seconds=rng.choice((0.002, 0.02, 0.2)),
        lend_seconds=rng.choice((0.1, 0.5, 30.0)),
    )


def _faults(rng: random.Random, scenario: Scenario, encode: int) -> list[Fault]:
    """Faults of encode nodes, and of those who ask them. A crash of value 1 is silent."""
    nodes = [f"e{i}" for i in range(encode)]
    workers = [f"p{i}" for i in range(len(scenario.prefill))]
    workers += [f"d{i}" for i in range(len(scenario.decode))]
    gateways = [f"g{i}" for i in range(scenario.gateways)]
    found = []
    for _ in range(rng.choice((0, 2, 4, 8)) if nodes else 0):
        kind = rng.choice(("crash", "crash", "crash", "stall", "cut", "drop", "slow", "drain", "pull"))
        target, other, value = rng.choice(nodes), "", 0
        if kind in ("cut", "drop", "slow"):
            other = rng.choice([*workers, *workers, *gateways])
            value = rng.choice((10, 100)) if kind == "slow" else 0
        elif kind == "crash":
            value = rng.randrange(2)
        elif kind == "pull":
            target, value = rng.choice(workers), rng.randrange(6)
        elif kind == "stall" and rng.random() < 0.5:  # of copies, while what they read may be reused
            target, value = rng.choice(workers), 2
        seconds = 0.0 if kind in ("drop", "pull") else rng.choice((0.05, 0.5, 2.0)) * rng.uniform(0.2, 1.0)
        found.append(
            Fault(rng.uniform(0.9, rng.choice((1.5, 3.0, 6.0))), kind, target, other, seconds, value)
        )
    return found
