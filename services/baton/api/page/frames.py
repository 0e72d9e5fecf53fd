"""What the page shows, as JSON. Seconds and bytes throughout; times of day are seconds since 1970."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.api.openai_fields import Json
from baton.api.page.processes import WatchedProcess
from baton.api.page.window import QUANTILES, Figures, values
from baton.gateway.metrics import GatewayMetrics
from baton.v1 import node_pb2

DIGITS = 5

_LOAD = ("waiting", "prefilling", "handing_off", "running", "rows", "requests", "paused", "leases", "pulls")
_PAGES = ("total", "free", "cached", "owned", "quarantined")
_USES = ("free", "cached", "owned", "leased", "pulling", "quarantined")


def figures_json(figures: Figures | None) -> Json | None:
    if figures is None:
        return None
    return {
        "seconds": _short(figures.seconds),
        "requests": _short(figures.requests),
        "output_tokens": _short(figures.output_tokens),
        "ttft": dict(zip(_QUANTILES, map(_short, figures.ttft), strict=True)),
        "itl": dict(zip(_QUANTILES, map(_short, figures.itl), strict=True)),
        "goodput": _short(figures.goodput),
        "good": _short(figures.good),
    }


_QUANTILES = tuple(f"p{round(100 * share)}" for share in QUANTILES)


def point(at: float, figures: Figures, running: int) -> list[float | None]:
    """A point of the charts: time of day, requests and output tokens per second, TTFT and ITL for each of
    QUANTILES, goodput, running requests."""
    found = (
        at,
        figures.requests,
        figures.output_tokens,
        *figures.ttft,
        *figures.itl,
        figures.goodput,
        running,
    )
    return [_short(value) for value in found]


def process_json(process: WatchedProcess) -> Json:
    info, load = process.info, process.load
    found: Json = {"role": process.role, "address": process.address, "health": process.health}
    found["problems"] = [process.error] if process.error else []
    if info is not None:
        found |= {
            "pid": info.pid,
            "version": info.version,
            "device": info.device,
            "incarnation": f"{info.incarnation:016x}",
        }
    if load is not None:
        found["problems"] += [problem.message for problem in load.problems]
        found["load"] = {name: getattr(load, name) for name in _LOAD}
        if load.pages.total:
            found["pages"] = {name: getattr(load.pages, name) for name in _PAGES}
        if sum(load.drafted_places[:1]):
            found["drafter"] = load.drafter
            found["tokens_a_row"] = _short(1 + load.accepted_drafts / load.drafted_places[0])
        if load.encoded_images:
            found["encoded_images"] = load.encoded_images
            found["images_a_batch"] = _short(load.encoded_images / load.encode_batches)
        found["queued_tokens"] = load.queued_tokens
        found["wait"] = load.wait_ms / 1000
        found["step"] = load.step_us / 1e6
        found["resident_bytes"] = process.resident_bytes
    return found


def pool_json(pages: node_pb2.PageMap) -> Json:
    """`runs`: the number of cells, then their pages by use, trailing zeros left out."""
    runs = []
    for run in pages.runs:
        numbers = [getattr(run, use) for use in _USES]
        while numbers and not numbers[-1]:
            numbers.pop()
        runs.append([run.cells, *numbers])
    return {"total": pages.total, "pages_per_cell": pages.pages_per_cell, "runs": runs}


def reasons_json(metrics: GatewayMetrics, processes: Iterable[WatchedProcess]) -> Json:
    """Errors and retries by reason, and where prompts were computed and why, since each process started."""
    retries: Counter[str] = Counter()
    for process in processes:
        if process.load is not None:
            retries.update(dict(process.load.handoff_retry_reasons))
    decisions: dict[str, Json] = {"split": {}, "local": {}}
    for (way, why), count in values(metrics.decisions).items():
        if count:
            decisions[way][why] = count
    return {
        "failures": {reason: count for (reason,), count in values(metrics.failures).items()},
        "refusals": {f"{reason} ({api})": count for (api, reason), count in values(metrics.refusals).items()},
        "retries": dict(retries),
        "resumes": values(metrics.resumes)[()],
        "prompts": decisions,
    }


def _short(value: float | None) -> float | None:
    """Few digits: each frame goes to every open page once a second."""
    if value is None:
        return None
    return round(value, 3) if abs(value) >= 10 else float(f"{value:.{DIGITS}g}")
