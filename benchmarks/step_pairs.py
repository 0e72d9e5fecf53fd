"""Steps on a CPU of several source trees, in turn: ratios on a machine whose speed changes.

Each tree's engine runs in a process of its own with one thread; each run follows the same one of the others.

    git worktree add ../before COMMIT    # build its stubs: CONTRIBUTING.md
    python benchmarks/step_pairs.py ../before .
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = {"first tokens": 2, "step": 40}
"""What is measured -> decode steps after the prompts."""
CHILD = """
import json, os, sys
sys.path.insert(0, os.getcwd() + "/services")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from baton.bench.engine_bench import EngineBench
from baton.bench.steps import Point, jobs_of
from baton.bench.workload import Job
from baton.config import WorkerConfig
size = {"max_rows": 16, "token_budget": 8192, "kv_tokens": 16384}
bench = EngineBench(WorkerConfig(model=sys.argv[1], device="cpu", **size))
print("ready", file=answers, flush=True)
for number, line in enumerate(sys.stdin):
    rows, steps, least, most = json.loads(line)
    lengths = [least + 37 * i % (most - least + 1) for i in range(rows)]
    jobs = jobs_of(Point(rows, most), steps, bench, number)
    jobs = [Job(0.0, x.prompt[:n], x.output_tokens, x.seed) for x, n in zip(jobs, lengths, strict=True)]
    run = bench.run(jobs, 0.0)
    print(json.dumps([run.first_tokens_seconds, run.tpot]), file=answers, flush=True)
"""


def start(tree: Path, model: str) -> subprocess.Popen[str]:
    """Raises SystemExit if the tree's engine does not start."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, model],
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise SystemExit(f"{tree}: the engine does not start (are its stubs built?)")
    return child


def ask(child: subprocess.Popen[str], *what: int) -> tuple[float, float]:
    """`what`: rows, decode steps, least and most tokens of a prompt -> seconds until all rows had their first
    token, and of a step."""
    assert child.stdin is not None and child.stdout is not None
    print(json.dumps(what), file=child.stdin, flush=True)
    first, step = json.loads(child.stdout.readline())
    return first, step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+", type=Path, help="folders with services/; ratios are to the first")
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--prompts", type=int, nargs=2, default=(90, 159), help="least and most tokens of one"
    )
    parser.add_argument("--rounds", type=int, default=9, help="after one to warm up")
    options = parser.parse_args()
    children = [start(tree, options.model) for tree in options.trees]
    for rows in (1, 16):
        for at, (what, steps) in enumerate(RUNS.items()):
            taken: list[list[float]] = [[] for _ in children]
            for number in range(options.rounds + 1):
                order = list(enumerate(children))
                for index, child in order if number % 2 else reversed(order):
                    seconds = ask(child, rows, steps, *options.prompts)[at]
                    if number:
                        taken[index].append(seconds * 1e3)
            for tree, own in zip(options.trees, taken, strict=True):
                ratio = statistics.median(a / b for a, b in zip(own, taken[0], strict=True))
                print(f"{rows:2} rows, {what:12} {statistics.median(own):8.3f} ms {ratio:6.3f}  {tree}")
    for child in children:
        child.communicate()


if __name__ == "__main__":
    main()
