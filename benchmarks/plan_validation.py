"""Predictions of `baton plan` compared with real processes, on a CPU.

    python benchmarks/plan_validation.py --runs 3 --json benchmarks/results/plan_validation.json

Each case is a layout and a load. A run measures the costs of its nodes (as `baton bench profile` does),
loads a deployment of real processes (as `baton bench serve` does), and simulates the same requests with the
same times and lengths. Throughput, goodput, TTFT p50, TPOT p50, ITL p50 and mean end-to-end latency are
compared; p99 is reported. In "timed" cases steps take a given time and compute nothing, so that two cores
can run several nodes; "computed" cases run the demo model with one thread per worker. Exits with 0 if each
compared ratio, the median of the runs, is within --tolerance.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from shared import make_parser, save_results

from baton.bench.engine_bench import EngineBench
from baton.bench.kv_transfer import pull_cost
from baton.bench.load_processes import make_target, run_clients
from baton.bench.profile import LIMIT, SPLIT, fitted, grid, measure_all, measure_host, problem
from baton.bench.summary import summarize
from baton.bench.workload import TokenRange, Workload
from baton.cli.console import table
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.config import DecodeConfig, PrefillConfig, WorkerConfig
from baton.sizing.nodes import NodeSetup
from baton.sizing.profile import EngineFacts, Profile, to_dict
from baton.sizing.simulation import NodeLayout, simulate
from baton.sizing.traffic import Arrival, Traffic
from baton.slo import Targets
from baton.step_cost import StepCost

COMPARED = (
    "requests_per_second",
    "output_tokens_per_second",
    "goodput_per_second",
    "ttft_ms.p50",
    "tpot_ms.p50",
    "itl_ms.p50",
    "e2e_ms.mean",
)
REPORTED = ("ttft_ms.p99", "itl_ms.p99", "e2e_ms.p99")
KV_TOKENS = 32768
TIMED_STEP = StepCost(fixed=20e-3, row=2e-4, key=2e-7, token=2e-4, pair=2e-9)
TIMEOUT = 60.0


@dataclass(frozen=True)
class Case:
    name: str
    computed: bool
    layout: NodeLayout
    work: Workload
    targets: Targets


def load(rate: float, seconds: float, prompt: TokenRange, output: TokenRange) -> Workload:
    return Workload(prompt_tokens=prompt, output_tokens=output, rate=rate, seconds=seconds)


def cases(seconds: float, stretch: float) -> list[Case]:
    """stretch: of timed steps, and so of the times between requests and of targets."""
    prompts, outputs = TokenRange(100, 700), TokenRange(16, 96)
    computed = load(1.6, seconds, TokenRange(64, 384), TokenRange(16, 64))

    def timed(name: str, layout: NodeLayout, rate: float, itl_ms: float = 50) -> Case:
        targets = Targets(ttft_ms=300 * stretch, itl_ms=itl_ms * stretch)
        return Case(f"timed {name}", False, layout, load(rate / stretch, seconds, prompts, outputs), targets)

    return [
        timed("1 + 1", NodeLayout(1, 1), 4),
        timed("2 + 1", NodeLayout(2, 1), 8),
        # Prompts lie between its tokens: what 50 ms let through is too few to be compared.
        timed("2 aggregated", NodeLayout(0, 2), 5, itl_ms=150),
        Case("computed 1 aggregated", True, NodeLayout(0, 1), computed, Targets(ttft_ms=300, itl_ms=30)),
        Case("computed 1 + 1", True, NodeLayout(1, 1), computed, Targets(ttft_ms=300, itl_ms=30)),
    ]


def timed_step(stretch: float) -> StepCost:
    """Seconds: as of a model that is too large for these cores."""
    return StepCost(*(stretch * each for each in astuple(TIMED_STEP)))


class Model:
    """The demo model in this process: what the simulation must know of it is measured here."""

    def __init__(self, console: Console) -> None:
        with console.status("Loading the model"):
            self._bench = EngineBench(WorkerConfig(device="cpu", threads=1, kv_tokens=KV_TOKENS))
        bench = self._bench
        self.vocabulary = bench.vocabulary
        self.layout = bench.engine.pool.layout
        self.device = bench.engine.device
        self.engine = EngineFacts(
            page_size=self.layout.page_size,
            kv_tokens=KV_TOKENS,
            context_length=bench.context,
            max_rows=bench.config.max_rows,
            token_budget=bench.config.token_budget,
            page_bytes=self.layout.page_bytes,
            overlap=bench.engine.overlap,
            device="cpu",
        )

    def step(self) -> tuple[StepCost, dict[str, float]]:
        """Over what the computed case has in its steps; and the fit's error."""
        shapes = grid((1, 2, 4, 8), (64, 192, 384), (16, 64, 128, 256, 384))
        usable = [shape for shape in shapes if not problem(shape, self._bench)]
        found = fitted(measure_all(self._bench, usable, 0.2, lambda shape: None))
        return found.cost, found.summary()


def deployment(layout: NodeLayout, step_profile: Path | None, console: Console) -> Deployment:
    worker = {"device": "cpu", "threads": 1, "kv_tokens": KV_TOKENS, "step_profile": str(step_profile or "")}
    settings = {"prefill": worker, "decode": {**worker, **SPLIT}}
    plan = DeploymentPlan(
        prefill=layout.prefill, decode=layout.decode, http_port=None, settings=settings, restart=False
    )
    return Deployment(plan, console)


async def run_case(
    case: Case, model: Model, number: int, timed_step: StepCost, console: Console
) -> AsyncIterator[dict[str, Any]]:
    """Each of `number` runs measures what it needs right before, so that a machine on which other things run
    is at least the same one."""
    with tempfile.TemporaryDirectory(prefix="baton-plan-") as folder:
        file = Path(folder) / "steps.json"
        file.write_text(json.dumps({"step": asdict(timed_step)}))
        async with AsyncExitStack() as stack:
            first = case.layout if not case.computed else NodeLayout(1, 1)
            measured = timed = await stack.enter_async_context(deployment(first, file, console))
            if case.computed:
                measured = await stack.enter_async_context(deployment(case.layout, None, console))
            target = await make_target(measured.address, 1, 8, TIMEOUT)
            for run in range(number):
                work = replace(case.work, seed=1 + run)
                host = await measure_host(timed.address, timed_step, seed=1000 + run)
                pull = await pull_cost(model.layout, model.device, "")
                step, error = model.step() if case.computed else (timed_step, None)
                profile = Profile(step, model.engine, pull, host)
                real = await run_clients(target, work, lambda *_: None)
                figures = summarize(real.records, case.targets, work.seconds)
                predicted = predict(replace(case, work=work), profile, model.vocabulary)
                yield {
                    "case": case.name,
                    "run": run,
                    "workload": work.to_dict(),
                    "targets": asdict(case.targets),
                    "profile": to_dict(profile),
                    "fit_error": error,
                    "requests": figures["requests"],
                    "failures": figures["failures"],
                    "client_busy": real.busy,
                    "load_average": os.getloadavg()[0],
                    "busy": predicted["busy"],
                    "figures": compare(predicted, figures),
                }


def predict(case: Case, profile: Profile, vocabulary: int) -> dict[str, Any]:
    """The same requests, simulated."""
    jobs = case.work.jobs(vocabulary, profile.engine.context_length)
    arrivals = tuple(Arrival(job.at, len(job.prompt), job.output_tokens) for job in jobs)
    setup = NodeSetup(profile, PrefillConfig(), DecodeConfig(local_prefill_tokens=LIMIT))
    found = simulate(case.layout, setup, Traffic(arrivals, 0, len(arrivals)))
    figures = summarize(found.records, case.targets, case.work.seconds)
    busy = {kind: asdict(part)["busy"] for kind in ("prefill", "decode") if (part := getattr(found, kind))}
    return figures | {"busy": busy}


def value(figures: dict[str, Any], name: str) -> float:
    for part in name.split("."):
        figures = figures[part]
    return float(figures)  # type: ignore[arg-type]


def compare(predicted: dict[str, Any], real: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Name -> prediction, reality and the first over the second."""
    found = {}
    for name in (*COMPARED, *REPORTED):
        a, b = value(predicted, name), value(real, name)
        found[name] = {"predicted": a, "real": b, "ratio": a / b if b else float(a == b)}
    return found


def show_run(run: dict[str, Any], console: Console) -> None:
    busy = f"load {run['load_average']:.1f}"
    rows = table(f"{run['case']}, run {run['run']}, {busy}", "predicted", "real", "ratio")
    for name, each in run["figures"].items():
        rows.add_row(name, f"{each['predicted']:.2f}", f"{each['real']:.2f}", f"{each['ratio']:.3f}")
    console.print(rows)


def verdicts(runs: list[dict[str, Any]], tolerance: float) -> Iterator[dict[str, Any]]:
    """Of each case and compared figure: the median ratio of the runs."""
    for case in dict.fromkeys(run["case"] for run in runs):
        for name in COMPARED:
            ratios = [run["figures"][name]["ratio"] for run in runs if run["case"] == case]
            middle = statistics.median(ratios)
            holds = abs(middle - 1.0) <= tolerance
            yield {"case": case, "figure": name, "ratio": middle, "ratios": ratios, "holds": holds}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each case; the median counts")
    parser.add_argument("--seconds", type=float, default=25.0, help="how long requests arrive")
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="makes timed steps longer, for a machine that is busy"
    )
    parser.add_argument("--case", action="append", help="only cases whose names begin so; may be repeated")
    parser.add_argument("--tolerance", type=float, default=0.15)
    given = parser.parse_args()
    console = Console()
    known = cases(given.seconds, given.stretch)
    chosen = [case for case in known if not given.case or case.name.startswith(tuple(given.case))]
    if not chosen:
        parser.error(f"no case is called so; there are {', '.join(case.name for case in known)}")
    model = Model(console)
    runs: list[dict[str, Any]] = []

    async def run_all(case: Case) -> None:
        async for run in run_case(case, model, given.runs, timed_step(given.stretch), console):
            runs.append(run)
            show_run(run, console)

    for case in chosen:
        asyncio.run(run_all(case))
    judged = list(verdicts(runs, given.tolerance))
    for each in judged:
        ratios = ", ".join(f"{ratio:.3f}" for ratio in each["ratios"])
        verdict = "holds" if each["holds"] else "DOES NOT HOLD"
        console.print(
            f"{each['case']}, {each['figure']}: {each['ratio']:.3f} of {ratios}: {verdict}", highlight=False
        )
    settings = {name: getattr(given, name) for name in ("tolerance", "seconds", "stretch")}
    save_results(given, {**settings, "verdicts": judged, "runs": runs})
    return 0 if all(each["holds"] for each in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
