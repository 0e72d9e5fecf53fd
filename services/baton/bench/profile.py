"""The cost of the engine's steps, measured and fitted, and the host's cost around them in a deployment."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from baton.bench.engine_bench import EngineBench
from baton.bench.load_processes import make_target, run_clients
from baton.bench.workload import TokenRange, Workload
from baton.engine.plan import PlanRow, Runner, SlotInit, StepPlan, step_load
from baton.engine.sampling_params import SamplingParams
from baton.sizing.profile import HostCost
from baton.slo import RequestTimes
from baton.step_cost import StepCost, StepLoad, chunk_pairs, fit

WARM_UP = 2
LEAST = 5
"""Measured steps of a shape at least."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The contents of a step."""

    rows: int = 0
    """Decode rows, each with `context` tokens before it."""
    context: int = 0
    chunk: int = 0
    """Prompt tokens, with `cached` ones before them."""
    cached: int = 0

    def pages(self, size: int) -> int:
        chunk = -(-(self.cached + self.chunk) // size) if self.chunk else 0
        return self.rows * (self.context // size + 1) + chunk

    def __str__(self) -> str:
        decode = f"{self.rows} rows of {self.context}" if self.rows else ""
        chunk = f"{self.chunk} prompt tokens after {self.cached}" if self.chunk else ""
        return " and ".join(part for part in (decode, chunk) if part)


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    shape: Shape
    load: StepLoad
    seconds: float
    """Median."""


def grid(rows: Sequence[int], contexts: Sequence[int], chunks: Sequence[int]) -> list[Shape]:
    """Decode steps, prompt chunks with and without cached tokens before them, and mixed steps."""
    decode = [Shape(rows=count, context=context) for count, context in itertools.product(rows, contexts)]
    prompts = [
        Shape(chunk=chunk, cached=cached) for chunk, cached in itertools.product(chunks, (0, *contexts))
    ]
    middle = contexts[len(contexts) // 2]
    both = [Shape(count, middle, chunk) for count, chunk in itertools.product(rows[1:], chunks[1:])]
    return [*decode, *prompts, *both]


def problem(shape: Shape, bench: EngineBench) -> str:
    """Why this engine cannot run the shape; empty: it can."""
    config, pool = bench.config, bench.engine.pool
    if shape.rows + bool(shape.chunk) > config.max_rows:
        return f"more rows than {config.max_rows}"
    if shape.rows + shape.chunk > config.token_budget:
        return f"more tokens than the budget of {config.token_budget}"
    if max(shape.context + 1, shape.cached + shape.chunk) > bench.context:
        return f"beyond the context of {bench.context}"
    if shape.pages(pool.layout.page_size) > pool.num_pages:
        return f"needs {shape.pages(pool.layout.page_size)} pages; the pool has {pool.num_pages}"
    return ""


def measure_all(
    bench: EngineBench, shapes: Sequence[Shape], seconds: float, on_progress: Callable[[Shape], None]
) -> list[MeasuredSteps]:
    """The median step of each shape, repeated for `seconds`. `on_progress` is called before each shape."""
    found = []
    pool = bench.engine.pool
    pool.raw[: max(shape.pages(pool.layout.page_size) for shape in shapes)].zero_()
    for shape in shapes:
        on_progress(shape)
        rows = tuple(_rows(shape, pool.layout.page_size, len(pool.layout.groups)))
        measured = _measure(bench.engine.runner, rows, bench.engine.overlap, seconds)
        found.append(MeasuredSteps(shape, step_load(rows), measured))
    return found


def _rows(shape: Shape, size: int, groups: int = 1) -> Iterator[PlanRow]:
    """Rows with different pages, the same in all KV groups."""
    each, first = shape.context // size + 1, 0
    for slot in range(shape.rows):
        pages = tuple(range(first, first + each))
        yield PlanRow(slot, None, shape.context, (pages,) * groups, (slot,))
        first += each
    if shape.chunk:
        count = -(-(shape.cached + shape.chunk) // size)
        tokens = (0,) * shape.chunk
        slot = shape.rows
        pages = tuple(range(first, first + count))
        yield PlanRow(slot, tokens, shape.cached, (pages,) * groups, (slot,))


def _measure(runner: Runner[Any], rows: tuple[PlanRow, ...], overlap: bool, seconds: float) -> float:
    """Median seconds from step to step. With overlap the next step is launched before one is read, so that
    the device's time is measured."""
    params = SamplingParams(temperature=0.0)
    inits = tuple(SlotInit(row.slot, params, 0, (), (), last_token=0) for row in rows)
    pending = runner.launch(StepPlan(1, rows, inits)) if overlap else None
    times: list[float] = []
    number, started = 1, time.perf_counter()
    while len(times) < LEAST + WARM_UP or time.perf_counter() - started < seconds:
        number += 1
        begun = time.perf_counter()
        launched = runner.launch(StepPlan(number, rows, inits if number == 2 else ()))
        if overlap:
            pending, launched = launched, pending
        runner.read(launched)
        times.append(time.perf_counter() - begun)
    if overlap:
        runner.read(pending)
    return statistics.median(times[WARM_UP:])


@dataclass(frozen=True, slots=True)
class Fitted:
    cost: StepCost
    errors: list[float]
    """Relative error of the fit for each measured step, in the order of measurement."""

    def summary(self) -> dict[str, float]:
        """Absolute relative errors."""
        sizes = sorted(map(abs, self.errors))
        return {
            "median": statistics.median(sizes),
            "p90": sizes[int(0.9 * (len(sizes) - 1))],
            "worst": sizes[-1],
        }


def fitted(measured: Sequence[MeasuredSteps]) -> Fitted:
    """Raises ValueError if nothing was measured."""
    cost = fit([(each.load, each.seconds) for each in measured])
    return Fitted(cost, [cost.seconds(each.load) / each.seconds - 1.0 for each in measured])


def points(measured: Sequence[MeasuredSteps], found: Fitted) -> list[dict[str, Any]]:
    """For JSON, in milliseconds."""
    return [
        {
            "step": str(each.shape),
            **dict(zip(("rows", "keys", "tokens", "pairs"), astuple(each.load), strict=True)),
            "ms": each.seconds * 1e3,
            "fitted_ms": found.cost.seconds(each.load) * 1e3,
        }
        for each in measured
    ]


STEP = StepCost(fixed=0.01, row=0.0, key=0.0, token=0.0, pair=0.0)
"""Steps so long that each has a message of its own."""
LOCAL, LIMIT, REMOTE = 16, 32, 256
"""Prompt tokens that the decode node computes itself, its limit, and prompt tokens that it hands off; each
prompt fits into one step."""
SPLIT = {"local_prefill_tokens": LIMIT}
"""Settings of the decode node that is measured."""
OUTPUT, MANY = 25, 24
REQUESTS = 10
TIMEOUT = 60.0


async def measure_host(server: str, step: StepCost, seed: int = 0) -> HostCost:
    """server: the gateway of an idle deployment whose steps cost `step`, and whose decode nodes have the
    settings SPLIT. seed: a new one for each call. Raises BenchError or BatonError."""
    target = await make_target(server, 1, 4, TIMEOUT)
    runs = [
        (await run_clients(target, _work(*sizes, seed=seed, run=run), lambda *_: None)).records
        for run, sizes in enumerate(
            ((LOCAL, OUTPUT, REQUESTS, 1), (REMOTE, 2, REQUESTS, 1), (LOCAL, OUTPUT, MANY, MANY))
        )
    ]
    return solve(step, *runs)


def _work(prompt: int, output: int, requests: int, concurrency: int, *, seed: int, run: int) -> Workload:
    return Workload(
        prompt_tokens=TokenRange(prompt, prompt),
        output_tokens=TokenRange(output, output),
        requests=requests,
        concurrency=concurrency,
        seed=seed,
        run=run,
    )


def solve(
    step: StepCost,
    local: Sequence[RequestTimes],
    remote: Sequence[RequestTimes],
    many: Sequence[RequestTimes],
) -> HostCost:
    """From requests one at a time, computed locally and handed off, and from MANY at a time."""
    one = _tpot(local) - _row_seconds(step, 1)
    row = max(0.0, (_tpot(many) - _row_seconds(step, MANY) - one) / (MANY - 1))
    request = _ttft(local) - _prompt_seconds(step, LOCAL)
    hop = (_ttft(remote) - _prompt_seconds(step, REMOTE) - request) / 2
    return HostCost(turn=max(0.0, one - row), row=row, request=max(0.0, request), hop=max(0.0, hop))


def _row_seconds(step: StepCost, rows: int) -> float:
    """Mean time of the decode steps of this many requests."""
    return step.seconds(StepLoad(decode_sequences=rows, context_tokens=rows * (LOCAL + OUTPUT // 2)))


def _prompt_seconds(step: StepCost, tokens: int) -> float:
    return step.seconds(StepLoad(prefill_tokens=tokens, attention_pairs=chunk_pairs(0, tokens)))


def _tpot(records: Sequence[RequestTimes]) -> float:
    return statistics.median(r.tpot for r in records if not r.error and r.tpot is not None)


def _ttft(records: Sequence[RequestTimes]) -> float:
    return statistics.median(record.ttft for record in records if not record.error)
