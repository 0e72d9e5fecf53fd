"""What passes around the steps of a deployment, for `baton bench profile`.

Real processes whose steps take a known time (`--step-profile`): whatever a client sees beyond it belongs to
the host. The demo model serves, since no model computes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from baton.bench.clients import run_clients
from baton.bench.record import Record
from baton.bench.workload import Range, Workload
from baton.cli.bench_running import make_target
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.config import DecodeConfig
from baton.engine.cost import StepCost, StepLoad
from baton.plan.profile import HostCost

STEP = StepCost(fixed=0.01, row=0.0, key=0.0, token=0.0, pair=0.0)
"""Long enough for steps not to share messages."""
LOCAL, REMOTE = 16, 256
"""Prompts that the decode node computes itself, and that it hands off."""
OUTPUT, MANY = 33, 24
REQUESTS = 10
ALONE = Workload(
    prompt_tokens=Range(LOCAL, LOCAL), output_tokens=Range(OUTPUT, OUTPUT), requests=REQUESTS, concurrency=1
)
TIMEOUT = 60.0


async def host_cost(console: Console, told: Callable[[], None]) -> HostCost:
    """Starts a deployment. `told` is called after each of 3 runs. Raises ChildError, ClientError or
    BatonError."""
    assert LOCAL <= DecodeConfig().local_prefill_tokens < REMOTE
    runs = []
    with tempfile.TemporaryDirectory(prefix="baton-profile-") as folder:
        profile = Path(folder) / "steps.json"
        profile.write_text(json.dumps({"step": asdict(STEP)}))
        worker = ("--step-profile", str(profile), "--device", "cpu", "--kv-tokens", "16384", "--threads", "1")
        flags = {"prefill": worker, "decode": worker}
        plan = DeploymentPlan(http_port=None, flags=flags, restart=False)
        async with Deployment(plan, console) as deployment:
            target = await make_target(deployment.address, 1, 4, TIMEOUT)
            for work in (
                ALONE,
                replace(ALONE, run=1, prompt_tokens=Range(REMOTE, REMOTE), output_tokens=Range(2, 2)),
                replace(ALONE, run=2, requests=2 * MANY, concurrency=MANY),
            ):
                runs.append((await run_clients(target, work, lambda *_: None)).records)
                told()
    return solve(*runs)


def solve(local: Sequence[Record], remote: Sequence[Record], many: Sequence[Record]) -> HostCost:
    """Of requests one at a time, with prompts computed locally and handed off, and of many at a time."""
    step = STEP.seconds(StepLoad())
    one, all_rows = _tpot(local) - step, _tpot(many) - step
    row = max(0.0, (all_rows - one) / (MANY - 1))
    turn = max(0.0, one - row)
    request = max(0.0, _ttft(local) - step)
    hop = max(0.0, (_ttft(remote) - _ttft(local)) / 2)
    return HostCost(turn=turn, row=row, request=request, hop=hop)


def _tpot(records: Sequence[Record]) -> float:
    return statistics.median(r.tpot for r in records if not r.error and r.tpot is not None)


def _ttft(records: Sequence[Record]) -> float:
    return statistics.median(record.ttft for record in records if not record.error)
