"""Pictures of a `serve` measurement: percentiles over rate, and distributions. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.figures import PERCENTILES

STYLES = dict(zip(PERCENTILES, ("o-", "s--", "^:"), strict=True))
HIGHEST = 99.9
"""Percentile at which distributions end, so that one outlier does not squeeze them."""


class NoPlots(Exception):
    """matplotlib is not there; one line that says how to get it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run."""

    label: str
    """Its rate, as shown: "8", "all at once", "16 at a time"."""
    rate: float | None
    """Requests per second; None in a closed loop."""
    figures: dict[str, Any]
    """Of `figures.summarize`."""
    ttft: Sequence[float]
    """Seconds, one a request."""
    itl: Sequence[float]
    """Seconds, one a token."""


def require() -> None:
    """Raises NoPlots; to be called before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlots("--plot needs matplotlib: pip install 'baton-serve[bench]'") from None


def plot(curves: Sequence[Curve], title: str, file: Path) -> None:
    """Writes a PNG: TTFT and ITL percentiles over rate above, their distributions below."""
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(2, 2)
    for column, name in enumerate(("ttft", "itl")):
        _over_rate(panels[0][column], curves, name)
        _distribution(panels[1][column], curves, name)
    figure.savefig(file, format="png")


def _over_rate(panel: Any, curves: Sequence[Curve], name: str) -> None:
    """A closed loop has no rate: its runs stand side by side."""
    rates = [curve.rate for curve in curves]
    by_rate = all(rate is not None for rate in rates)
    x = [float(rate or 0) for rate in rates] if by_rate else list(range(len(curves)))
    for percentile, style in STYLES.items():
        values = [curve.figures[f"{name}_ms"][f"p{percentile}"] for curve in curves]
        y = [float("nan") if value is None else value for value in values]
        panel.plot(x, y, style, label=f"p{percentile}", markersize=5)
    panel.set_xticks(x, [curve.label for curve in curves])
    panel.set_xlabel("offered load, requests/s" if by_rate else "closed loop")
    panel.set_ylabel(f"{name.upper()}, ms")
    panel.set_title(f"{name.upper()} over load", fontsize=10, loc="left")
    _logarithmic(panel.set_yscale, panel.yaxis)
    panel.grid(True, which="both", alpha=0.25)
    panel.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)


def _distribution(panel: Any, curves: Sequence[Curve], name: str) -> None:
    for curve in curves:
        samples = np.sort(np.array(curve.ttft if name == "ttft" else curve.itl)) * 1e3
        if not samples.size:
            continue
        kept = samples[samples <= np.percentile(samples, HIGHEST, method="higher")]
        unit = " req/s" if curve.rate is not None else ""
        part = np.arange(kept.size + 1) / samples.size
        panel.step(np.concatenate((kept[:1], kept)), part, where="post", label=curve.label + unit)
    panel.set_xlabel(f"{name.upper()}, ms")
    panel.set_ylabel("part of requests" if name == "ttft" else "part of tokens")
    panel.set_title(f"Distribution of {name.upper()} (to p{HIGHEST:g})", fontsize=10, loc="left")
    panel.set_ylim(0, 1.01)
    _logarithmic(panel.set_xscale, panel.xaxis)
    panel.grid(True, which="both", alpha=0.25)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, loc="lower right")


def _logarithmic(set_scale: Any, axis: Any) -> None:
    """With plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
