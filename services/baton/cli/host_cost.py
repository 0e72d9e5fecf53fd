"""What passes around the steps of a deployment, for `baton bench profile`.

Real processes whose steps take a known time (`--step-profile`): whatever a client sees beyond it belongs to
the host. The demo model serves, since no model computes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from baton.bench.clients import run_clients
from baton.bench.jobs import Range
from baton.bench.record import Record
from baton.bench.workload import Workload
from baton.cli.bench_running import make_target
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.plan.profile import HostCost
from baton.stepcost import StepCost, StepLoad, chunk_pairs

STEP = StepCost(fixed=0.01, row=0.0, key=0.0, token=0.0, pair=0.0)
"""Long enough for steps not to share messages."""
LOCAL, LIMIT, REMOTE = 16, 32, 256
"""Prompts that the decode node computes itself, up to a limit, and that it hands off; all fit into a step."""
SPLIT = ("--local-prefill-tokens", str(LIMIT))
"""Flags of the decode node that is measured."""
OUTPUT, MANY = 25, 24
REQUESTS = 10
TIMEOUT = 60.0


async def host_cost(console: Console) -> HostCost:
    """Starts a deployment for it. Raises ChildError, ClientError or BatonError."""
    with tempfile.TemporaryDirectory(prefix="baton-profile-") as folder:
        profile = Path(folder) / "steps.json"
        profile.write_text(json.dumps({"step": asdict(STEP)}))
        worker = ("--step-profile", str(profile), "--device", "cpu", "--kv-tokens", "16384", "--threads", "1")
        flags = {"prefill": worker, "decode": (*worker, *SPLIT)}
        plan = DeploymentPlan(http_port=None, flags=flags, restart=False)
        async with Deployment(plan, console) as deployment:
            return await measure_host(deployment.address, STEP)


async def measure_host(server: str, step: StepCost, seed: int = 0) -> HostCost:
    """server: the gateway of a deployment that does nothing else, all of whose steps take what `step` says,
    its decode nodes with the flags SPLIT. seed: another one each time. Raises ClientError or BatonError."""
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
        prompt_tokens=Range(prompt, prompt),
        output_tokens=Range(output, output),
        requests=requests,
        concurrency=concurrency,
        seed=seed,
        run=run,
    )


def solve(
    step: StepCost, local: Sequence[Record], remote: Sequence[Record], many: Sequence[Record]
) -> HostCost:
    """Of requests one at a time, with prompts computed locally and handed off, and of MANY at a time."""
    one = _tpot(local) - _row_seconds(step, 1)
    row = max(0.0, (_tpot(many) - _row_seconds(step, MANY) - one) / (MANY - 1))
    request = _ttft(local) - _prompt_seconds(step, LOCAL)
    hop = (_ttft(remote) - _prompt_seconds(step, REMOTE) - request) / 2
    return HostCost(turn=max(0.0, one - row), row=row, request=max(0.0, request), hop=max(0.0, hop))


def _row_seconds(step: StepCost, rows: int) -> float:
    """The mean of the decode steps of so many requests."""
    return step.seconds(StepLoad(decode_sequences=rows, context_tokens=rows * (LOCAL + OUTPUT // 2)))


def _prompt_seconds(step: StepCost, tokens: int) -> float:
    return step.seconds(StepLoad(prefill_tokens=tokens, attention_pairs=chunk_pairs(0, tokens)))


def _tpot(records: Sequence[Record]) -> float:
    return statistics.median(r.tpot for r in records if not r.error and r.tpot is not None)


def _ttft(records: Sequence[Record]) -> float:
    return statistics.median(record.ttft for record in records if not record.error)
