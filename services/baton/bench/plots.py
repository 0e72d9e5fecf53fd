"""Plots of a `baton bench serve` report: percentiles over rate, and distributions. Needs matplotlib.

    python -m baton.bench.plots load.json load.png

plots a report that was written by `baton bench serve --json load.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.summary import DISTRIBUTION, too_few
from baton.slo import PERCENTILES

STYLES = dict(zip(PERCENTILES, ("o-", "s--", "^:"), strict=True))
RunReport = dict[str, Any]
"""A run of a report."""


class NoPlots(Exception):
    """matplotlib is not installed; one line that says how to install it."""


def require() -> None:
    """Raises NoPlots. Called before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlots("--plot needs matplotlib: pip install 'baton-serve[bench]'") from None


def plot(report: dict[str, Any], file: Path) -> None:
    """Writes the plot of a report as PNG. Raises NoPlots."""
    require()
    draw(report).savefig(file, format="png")


def draw(report: dict[str, Any]) -> Any:
    """A matplotlib figure: TTFT and ITL percentiles over rate above, their distributions below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(report), fontsize=11)
    panels = figure.subplots(2, 2)
    for column, name in enumerate(("ttft", "itl")):
        _over_rate(panels[0][column], report["runs"], name)
        _distribution(panels[1][column], report["runs"], name)
    return figure


def _title(report: dict[str, Any]) -> str:
    processes, work = report["deployment"]["processes"], report["runs"][0]["workload"]
    counts = [f"{sum(p['role'] == role for p in processes)} {role}" for role in ("prefill", "decode")]
    model = next((p["model"]["name"] for p in processes if "model" in p), "")
    devices = ", ".join(sorted({p["device"] for p in processes if p.get("device")}))
    tokens = [_range(**work[f"{name}_tokens"]) for name in ("prompt", "output")]
    return (
        f"{model}, {' + '.join(counts)} on {devices}; {tokens[0]} tokens in, {tokens[1]} out; "
        f"Baton {report['versions']['baton']} ({report['versions']['commit']})"
    )


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _over_rate(panel: Any, runs: Sequence[RunReport], name: str) -> None:
    """Runs of a closed loop, which has no rate, are placed side by side."""
    rates = [run["workload"]["rate"] for run in runs]
    by_rate = all(rate is not None for rate in rates)
    x = [float(rate) for rate in rates] if by_rate else list(range(len(runs)))
    for percentile, style in STYLES.items():
        values = [run[f"{name}_ms"][f"p{percentile}"] for run in runs]
        y = [float("nan") if value is None else value for value in values]
        panel.plot(x, y, style, label=f"p{percentile}", markersize=5)
    panel.set_xticks(x, [run["load"] for run in runs])
    panel.set_xlabel("offered load, requests/s" if by_rate else "closed loop")
    panel.set_ylabel(f"{name.upper()}, ms")
    # ITL percentiles are over tokens, of which there are far more than requests.
    few = [run["finished"] for run in runs if too_few(run["finished"])] if name == "ttft" else []
    note = f"; p{too_few(min(few))[0]} of {min(few)} requests is close to the slowest" if few else ""
    panel.set_title(f"{name.upper()} over load{note}", fontsize=10, loc="left")
    if any(value > 0 for run in runs for value in run[f"{name}_ms"].values() if value is not None):
        _logarithmic(panel.set_yscale, panel.yaxis)
    panel.grid(True, which="both", alpha=0.25)
    panel.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)


def _distribution(panel: Any, runs: Sequence[RunReport], name: str) -> None:
    for run in runs:
        values = run[f"{name}_distribution_ms"]
        if values:
            unit = " req/s" if run["workload"]["rate"] is not None else ""
            panel.plot(values, np.array(DISTRIBUTION) / 100, label=run["load"] + unit)
    panel.set_xlabel(f"{name.upper()}, ms")
    panel.set_ylabel("part of requests" if name == "ttft" else "part of tokens")
    panel.set_title(f"Distribution of {name.upper()}, to p{DISTRIBUTION[-1]:g}", fontsize=10, loc="left")
    panel.set_ylim(0, 1.01)
    if any(value > 0 for run in runs for value in run[f"{name}_distribution_ms"]):
        _logarithmic(panel.set_xscale, panel.xaxis)
    panel.grid(True, which="both", alpha=0.25)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, loc="lower right")


def _logarithmic(set_scale: Any, axis: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade. The axis needs a value above 0."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def main(arguments: Sequence[str]) -> int:
    """Plots an existing report; returns the exit code."""
    if len(arguments) != 2:
        print("usage: python -m baton.bench.plots REPORT.json PICTURE.png", file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    try:
        plot(json.loads(source.read_text()), target)
    except (NoPlots, OSError, KeyError, ValueError) as error:
        print(f"{source} cannot be drawn: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
