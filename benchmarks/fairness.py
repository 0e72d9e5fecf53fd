"""How much very long prompts delay short requests: TTFT and ITL with and without them.

    python benchmarks/fairness.py --seconds 30 --json benchmarks/results/fairness.json

One prefill and one decode node whose steps take the time of a fixed profile (tests/cluster/fairness.py) and
compute nothing. A short request (64 tokens in, 32 out) arrives every 0.1 s, first alone, then while two
prompts of 30,000 tokens are computed at any time. Measured split, and with prompts computed on the decode
node. By design a short request's first token waits for at most two more steps, and a token for at most one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from fairness import BUDGET, COST, LONG, Outcome, full_step, make_deployment, measure
from rich.console import Console
from shared import make_parser, save_results

from baton.cli.console import table


def show(found: dict[str, Outcome], console: Console) -> None:
    rows = table("deployment", "milliseconds", "alone", "beside long prompts", "times")
    for name, outcome in found.items():
        alone, beside = outcome.alone.milliseconds(), outcome.beside.milliseconds()
        for figure, before in alone.items():
            times = f"{beside[figure] / before:.2f}"
            rows.add_row(name, figure, f"{before:.1f}", f"{beside[figure]:.1f}", times)
    console.print(rows)
    for name, outcome in found.items():
        text = f"{outcome.long_prompts} long prompts, median TTFT {outcome.long_seconds:.1f} s"
        console.print(f"{name}: {text}", highlight=False)
    console.print(f"The longest step takes {1e3 * full_step():.0f} ms.", highlight=False)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the four measurements")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        deployment, split, local = make_deployment(Path(scratch))
        with deployment:
            gateways = {"split": split, "aggregated": local}
            found = {
                name: asyncio.run(measure(each.address, args.seconds)) for name, each in gateways.items()
            }
    show(found, Console())
    setting = {"cost": asdict(COST), "token_budget": BUDGET, "long_tokens": LONG, "full_step": full_step()}
    figures = {name: asdict(outcome) for name, outcome in found.items()}
    save_results(args, {"setting": setting, "seconds": figures})


if __name__ == "__main__":
    main()
