"""Short requests, alone and beside prompts of tens of thousands of tokens. Steps take the time of a profile
and compute nothing; everything else is real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from checkpoints import VOCABULARY, make_model, save
from deployment import Deployment
from process import Process

from baton.bench.load_client import LoadClient
from baton.bench.workload import Job, TokenRange, Workload
from baton.rpc.channel import open_channel
from baton.slo import RequestTimes
from baton.step_cost import StepCost, StepLoad
from baton.v1 import inference_pb2_grpc

COST = StepCost(fixed=4e-3, row=1e-4, key=1e-7, token=4e-5, pair=2e-9)
"""Seconds. About those of an 8B model on one GPU, with steps a quarter of the size."""
BUDGET = 512
SHORT, OUTPUT = 64, 32
LONG = 30_000
LONG_AT_ONCE = 2
LONG_PROMPTS = 30
EVERY_SECONDS = 0.1
REQUEST_SECONDS = 60.0
numbers = itertools.count()


def full_step() -> float:
    """Seconds of the longest step that there is here: the budget spent on the end of a long prompt."""
    return COST.seconds(
        StepLoad(
            decode_sequences=16,
            context_tokens=16 * 2 * SHORT,
            prefill_tokens=BUDGET,
            attention_pairs=BUDGET * LONG,
        )
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What short requests saw, in seconds."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    @classmethod
    def of(cls, records: Iterable[RequestTimes]) -> Seen:
        records = list(records)
        failed = [record for record in records if record.error]
        assert records and not failed, failed
        ttft = [record.ttft for record in records]
        itl = [gap for record in records for gap in record.itl]
        return cls(*(float(np.percentile(each, p)) for each in (ttft, itl) for p in (50, 99)))

    def milliseconds(self) -> dict[str, float]:
        return {name: round(1e3 * value, 1) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`long_seconds`: medians of the long prompts' TTFT; they must not starve either."""

    alone: Seen
    beside: Seen
    long_seconds: float
    long_prompts: int


def make_deployment(folder: Path) -> tuple[Deployment, Process, Process]:
    """One prefill and one decode node; a gateway that splits, and one that leaves prompts to the decode
    node."""
    model = make_model(
        "qwen3", max_position_embeddings=2 * LONG, hidden_size=32, num_hidden_layers=1, head_dim=8
    )
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"step": asdict(COST)}))
    deployment = Deployment(folder, save(model, folder / "model"))
    flags = ("--step-profile", str(profile), "--token-budget", str(BUDGET), "--kv-tokens", str(8 * LONG))
    prefill = deployment.add_worker("prefill", *flags)
    decode = deployment.add_worker("decode", *flags)
    return deployment, deployment.add_gateway([decode], [prefill]), deployment.add_gateway([decode])


async def measure(address: str, seconds: float) -> Outcome:
    """Short requests at a steady rate through this gateway for so long, and again beside long prompts."""
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await _short(stub, 1.0)
        alone = await _short(stub, seconds)
        long = _asker(stub)
        jobs = [_job(0.0, LONG, 1) for _ in range(LONG_PROMPTS)]
        busy = asyncio.create_task(long.closed_loop(jobs, LONG_AT_ONCE))
        await asyncio.sleep(1.0)
        beside = await _short(stub, seconds)
        assert not busy.done(), "there were too few long prompts"
        busy.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await busy
    times = [record.ttft for record in long.records if not record.error]
    assert times, "no long prompt was computed: they starve"
    return Outcome(Seen.of(alone), Seen.of(beside), float(np.median(times)), len(times))


async def _short(stub: inference_pb2_grpc.InferenceStub, seconds: float) -> list[RequestTimes]:
    asker = _asker(stub)
    await asker.open_loop([_job(at, SHORT, OUTPUT) for at in np.arange(0.0, seconds, EVERY_SECONDS).tolist()])
    return asker.records


def _asker(stub: inference_pb2_grpc.InferenceStub) -> LoadClient:
    work = Workload(prompt_tokens=TokenRange(SHORT, SHORT), output_tokens=TokenRange(OUTPUT, OUTPUT))
    return LoadClient(stub, work, REQUEST_SECONDS, time.monotonic())


def _job(at: float, length: int, output: int) -> Job:
    """A prompt that nobody has cached."""
    number = next(numbers)
    prompt = np.random.default_rng(number).integers(VOCABULARY, size=length).tolist()
    return Job(at, prompt, output, seed=number, thread=number)
