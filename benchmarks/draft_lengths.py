"""What choosing the number of drafts costs: tokens a second over the best fixed number, or over none.

    python benchmarks/draft_lengths.py --model 8b --rows 1,4,16,64,256 --survival 0.5,0.8 --out DIR
    python benchmarks/draft_lengths.py --model 8b --survival 0 --fixed "" --drafter head --out DIR

Drafts are a model's own tokens (an oracle's), each spoiled with the chance 1 - SURVIVAL: with 0 none is
ever accepted. A line for each number of streams and each survival: milliseconds of a stream's token without
drafts, with each fixed number of them, and where each step chooses; how often that asks for drafts, of all
rows of all steps; and how many times as many tokens a second it has as the best of the others.
`--drafter head`: as in draft_speed.py. What steps have learned is kept from one run to the next, as a node
keeps it; the first run does not count. Writes DIR/draft_lengths.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from draft_speed import TEMPERATURE, Known, Told, milliseconds, write_head

from baton.bench.engine_bench import EngineBench
from baton.bench.machine import machine, versions
from baton.bench.workload import Job, TokenRange, Workload
from baton.config import MOST_DRAFTS, DecodeConfig
from baton.engine.draft.base import Drafter
from baton.engine.draft.length import DraftLengths, graph_tokens
from baton.engine.draft.oracle import prompt_digest
from baton.rpc.logs import configure
from baton.worker.engine import measure_steps

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", help="a shape of tools/make_shape.py, or a checkpoint")
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--survival", default="0.5,0.8")
    parser.add_argument("--fixed", default="1,3,5,7", help="numbers of drafts to compare with; may be empty")
    parser.add_argument("--drafter", choices=("none", "head"), default="none")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-tokens", type=int, default=100_000)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model, load = options.model, "auto"
        if not Path(model).exists():
            model, load = str(Path(folder) / "model"), "dummy"
            write_shape(options.model, Path(model))
        draft = "suffix"
        if options.drafter == "head":
            write_head(Path(model), Path(folder) / "head")
            draft = str(Path(folder) / "head")
        bench = EngineBench(
            DecodeConfig(
                draft=draft,
                model=model,
                load_format=load,
                device=options.device,
                dtype=options.dtype,
                kv_tokens=options.kv_tokens,
                max_rows=options.max_rows,
                token_budget=options.budget,
            )
        )
        cost = measure_steps(bench.engine)
        for rows in map(int, options.rows.split(",")):
            work = Workload(
                prompt_tokens=TokenRange(options.prompt, options.prompt),
                output_tokens=TokenRange(options.output, options.output),
                requests=rows,
                seed=1,
            )
            jobs = work.jobs(bench.vocabulary, bench.context)
            outputs = outputs_with_drafts(bench, jobs)
            for survival in map(float, options.survival.split(",")):
                lengths = DraftLengths(
                    graph_tokens if bench.engine.device.type != "cpu" else None, options.drafter == "head"
                )
                lengths.times.cost = cost
                line = {"rows": rows, "survival": survival}
                line |= compared(bench, jobs, Known(outputs, survival), lengths, options)
                found.append(line)
                print(*(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))
                sys.stdout.flush()
    report = {"machine": machine(), "versions": versions(""), "facts": bench.facts(), "lengths": found}
    (options.out / "draft_lengths.json").write_text(json.dumps(report, indent=1))
    bench.close()


def outputs_with_drafts(bench: EngineBench, jobs: list[Job]) -> dict[str, tuple[int, ...]]:
    """As rows with drafts compute them: in 16 bits those of rows of one token may differ."""
    outputs: dict[str, tuple[int, ...]] = {}
    for _ in range(2):
        told = Told(None, Known(outputs, 1.0))
        bench.run(jobs, TEMPERATURE, drafter=told, draft_tokens=MOST_DRAFTS)
        outputs = {
            prompt_digest(each.request.prompt): tuple(each.tokens[len(each.request.prompt) :])
            for each in told.seen
        }
    return outputs


def compared(
    bench: EngineBench,
    jobs: list[Job],
    oracle: Drafter,
    lengths: DraftLengths,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Medians, measured in turns."""
    head = bench.engine.drafter.drafter if options.drafter == "head" and bench.engine.drafter else None
    fixed = [int(each) for each in options.fixed.split(",") if each]
    ways: dict[str, dict[str, Any]] = {"none": {}}
    ways |= {str(count): {"draft_tokens": count} for count in fixed}
    ways["chosen"] = {"draft_tokens": MOST_DRAFTS, "lengths": lengths}
    times: dict[str, list[float]] = {way: [] for way in ways}
    drafts = asked = 0.0
    for repeat in range(options.repeats + 1):
        for way, how in ways.items():
            told = Told(head, oracle) if how else None
            run = bench.run(jobs, TEMPERATURE, drafter=told, **how)
            if repeat:
                times[way].append(milliseconds(run, len(jobs)))
            if way == "chosen" and run.step_seconds:
                drafts = run.step_tokens / len(run.step_seconds) / len(jobs)
                asked = told.asked / (len(run.step_seconds) * len(jobs)) if told is not None else 0.0
    medians = {way: statistics.median(each) for way, each in times.items()}
    best = min((each for each in medians if each != "chosen"), key=lambda each: medians[each])
    line: dict[str, Any] = {f"{way}_ms": value for way, value in medians.items()}
    return {
        **line,
        "a_step": drafts,
        "asked": asked,
        "best": best,
        "of_best": medians[best] / medians["chosen"],
    }


if __name__ == "__main__":
    main()
