"""What drafts cost: the time of a decode step with 0, 1, 3, 5 and 7 drafts a row, none of which is right.

    python benchmarks/draft_steps.py --model 8b --rows 1,16,64 --out DIR

A step's time does not depend on how many drafts are right, so that tokens a second follow from it: with N
tokens delivered a step, N divided by the step's time. Prints a line for each size, beside the step without
drafts in the same run; writes DIR/draft_steps.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.bench.engine_bench import EngineBench
from baton.bench.machine import machine, versions
from baton.bench.workload import TokenRange, Workload
from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.engine.request import Sequence as TokenSequence
from baton.rpc.logs import configure

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape

DRAFTS = (0, 1, 3, 5, 7)


class Wrong(Drafter):
    """Drafts one token again and again."""

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        return [sequence.tokens[-1] ^ 1] * most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", help="a shape of tools/make_shape.py, or a checkpoint")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-tokens", type=int, default=200_000)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model, load = options.model, "auto"
        if not Path(model).exists():
            write_shape(model, Path(folder))
            model, load = folder, "dummy"
        bench = EngineBench(
            DecodeConfig(
                draft="suffix",
                draft_tokens=DRAFTS[-1],
                model=model,
                load_format=load,
                device=options.device,
                kv_tokens=options.kv_tokens,
                max_rows=options.max_rows,
                token_budget=options.budget,
            )
        )
    found = []
    for rows in map(int, options.rows.split(",")):
        work = Workload(
            prompt_tokens=TokenRange(options.prompt, options.prompt),
            output_tokens=TokenRange(options.steps + 8, options.steps + 8),
            requests=rows,
            seed=1,
        )
        jobs = work.jobs(bench.vocabulary, bench.context)
        runs: dict[int, list[tuple[float, float]]] = {drafts: [] for drafts in DRAFTS}
        for repeat in range(options.repeats + 1):
            for drafts in DRAFTS:
                run = bench.run(jobs, options.temperature, drafter=Wrong(), draft_tokens=drafts)
                if repeat:
                    runs[drafts].append(((run.tpot or 0.0) * 1e3, sum(run.host.values()) * 1e3))
        plain = statistics.median(step for step, _ in runs[0])
        for drafts in DRAFTS:
            step = statistics.median(step for step, _ in runs[drafts])
            host = statistics.median(host for _, host in runs[drafts])
            line = {"rows": rows, "drafts": drafts, "step_ms": step, "host_ms": host, "ratio": step / plain}
            found.append(line)
            print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))
            sys.stdout.flush()
    report = {"machine": machine(), "versions": versions(""), "facts": bench.facts(), "steps": found}
    (options.out / "draft_steps.json").write_text(json.dumps(report, indent=1))
    bench.close()


if __name__ == "__main__":
    main()
