"""Deployments of real processes whose forward passes are sleeps of a given duration, for benchmarks of
everything except the model, and requests to them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from rich.console import Console

from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.supervisor import SERVE
from baton.client import AsyncClient
from baton.client.types import Options
from baton.step_cost import StepCost

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import SHAPES, write_shape

H200_8B = StepCost(fixed=4e-3, row=5e-5, key=3e-8, token=2e-5, pair=1.5e-9)
"""About what steps of an 8B model take on an H200 (docs/performance.md): 4 ms for one row, 0.05 ms for each
further one, 20 us for a prompt token; reading 147 kB of KV for each key at 4.8 TB/s, and 0.6 MFLOP for each
pair of a prompt at 400 TFLOP/s."""
VOCABULARY = SHAPES["tiny"]["vocab_size"]
CONTEXT = SHAPES["tiny"]["max_position_embeddings"]


def slowed(cost: StepCost, factor: float) -> StepCost:
    """Slower steps, so that the processes' own computation on two cores does not matter."""
    return StepCost(**{name: factor * value for name, value in asdict(cost).items()})


@contextmanager
def timed(
    cost: StepCost,
    prefill: int,
    decode: int,
    console: Console,
    *,
    kv_tokens: int = 131072,
    rows: int = 64,
    settings: Mapping[str, Any] = MappingProxyType({}),
    program: tuple[str, ...] = SERVE,
) -> Iterator[Deployment]:
    """A deployment with default settings except for the steps, to be entered with `async with`. settings:
    more, of all processes. program: what runs them."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_shape("tiny", folder / "model")
        (folder / "profile.json").write_text(json.dumps({"step": asdict(cost)}))
        model = {"model": str(folder / "model")}
        worker = {
            **model,
            "load_format": "dummy",
            "threads": 1,
            "device": "cpu",
            "step_profile": str(folder / "profile.json"),
            "token_budget": 2048,
            "max_rows": rows,
            "kv_tokens": kv_tokens,
        }
        plan = DeploymentPlan(
            prefill=prefill,
            decode=decode,
            http_port=None,
            settings={
                "gateway": {**settings},
                "tokenizer": {**model, **settings},
                "prefill": {**worker, **settings},
                "decode": {**worker, **settings},
            },
            program=program,
            restart=False,
        )
        yield Deployment(plan, console)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. Its prompt is random (`seed`), so that it is not found cached."""

    prompt_tokens: int
    output_tokens: int
    seed: str
    at: float = 0.0
    """Seconds after the start."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds since it was due."""

    first: float
    end: float
    tokens: int
    handed_off: bool
    ended: float
    """On the monotonic clock."""
    pulled_bytes: int


async def ask(
    client: AsyncClient, what: Ask, started: float, *, hand_off: bool | None = None, timeout: float = 120.0
) -> Answer:
    """Waits for the request's time, then sends it. Raises BatonError."""
    draw = Random(what.seed)
    prompt = [draw.randrange(VOCABULARY) for _ in range(what.prompt_tokens)]
    due = started + what.at
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    first = 0.0
    options: Options = {
        "max_tokens": what.output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "timeout": timeout,
    }
    if hand_off is not None:
        options["hand_off"] = hand_off
    async with client.stream(token_ids=prompt, **options) as stream:
        async for delta in stream:
            if delta.token_ids and not first:
                first = time.monotonic()
        ended = time.monotonic()
        done = stream.so_far
    assert done.usage is not None and done.stats is not None
    return Answer(
        first=first - due,
        end=ended - due,
        tokens=done.usage.output_tokens,
        handed_off=bool(done.stats.prefill_address),
        ended=ended,
        pulled_bytes=done.stats.pulled_bytes,
    )
