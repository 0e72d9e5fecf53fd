"""Medians over runs of gpu_split.py, each with a folder of its own.

    for run in 1 2 3; do python benchmarks/gpu_split.py --out runs/$run; done
    python benchmarks/medians.py runs/* --json medians.json

Prints the median and the values of all runs for each figure. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, dict[str, list[float]]]
"""Measurement, as `split-idle-128` -> figure -> a value a run."""


def of_one(run: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and value of the figures that docs/performance.md uses."""
    workload = run.get("workload")
    if workload is None:
        yield "output tokens/s", run["output_tokens_per_second"]
        return
    yield "TTFT p50", run["ttft_ms"]["p50"]
    if workload["rate"] is None:
        yield "first pause p50", run["first_pause_ms"]["p50"]
        yield "TPOT p50", run["tpot_ms"]["p50"]
        return
    yield "TTFT p99", run["ttft_ms"]["p99"]
    yield "ITL p50", run["itl_ms"]["p50"]
    yield "ITL p99", run["itl_ms"]["p99"]
    yield "goodput, requests/s", run["goodput_per_second"]


def collect(folders: list[Path]) -> tuple[dict[str, Any], Figures]:
    """Machine and versions of the first file, and all figures. Raises ValueError if a request failed or there
    are no figures."""
    about: dict[str, Any] = {}
    figures: Figures = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            report = json.loads(file.read_text())
            about = about or {name: report[name] for name in ("machine", "versions")}
            for run in report["runs"]:
                if run["failures"]:
                    raise ValueError(f"{file}: requests failed: {run['failures']}")
                for name, value in of_one(run):
                    figures[file.stem][name].append(value)
    if not figures:
        raise ValueError("no figures in these folders: give those that gpu_split.py wrote to")
    return about, figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="one a run")
    parser.add_argument("--json", type=Path, help="also write them here")
    args = parser.parse_args()
    try:
        about, figures = collect(args.folders)
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    table = Table("measurement", "figure", "median", "runs")
    report: dict[str, Any] = {**about, "figures": {}}
    for measurement, named in figures.items():
        report["figures"][measurement] = {}
        for name, values in named.items():
            median = statistics.median(values)
            report["figures"][measurement][name] = {"median": median, "runs": values}
            table.add_row(measurement, name, f"{median:,.5g}", ", ".join(f"{value:,.5g}" for value in values))
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
