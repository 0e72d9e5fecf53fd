"""What `baton plan` says: a row for each layout, and a sentence."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from baton.cli.bench_report import about, save, shown, table
from baton.latency import Targets
from baton.plan.profile import to_dict
from baton.plan.search import Goal, Plan, figures
from baton.plan.simulation import Simulated
from baton.plan.traffic import Traffic

if TYPE_CHECKING:
    from baton.cli.plan import Question

COLUMNS = (
    *("layout", "TTFT p50", "p99, ms", "ITL p50", "p99, ms", "TPOT, ms", "tok/s out"),
    *("goodput", "met", "busy", "held"),
)


def show(question: Question, plan: Plan, console: Console) -> None:
    """Rows in the order of the search."""
    goal = question.goal
    console.print(_asked(question), highlight=False)
    if missing := question.setup.profile.missing:
        taken = "defaults are taken; `baton bench profile` measures it"
        text = f"the profile has no {', '.join(missing)}: {taken}"

        console.print(text, style="yellow", highlight=False)
    rows = table(*COLUMNS)
    for found in plan.tried:
        rows.add_row(*_row(found, goal), style="bold" if found is plan.best else None)
    console.print(rows)
    console.print(sentence(question, plan), highlight=False, soft_wrap=True)


def _row(found: Simulated, goal: Goal) -> tuple[str, ...]:
    one = figures(found, goal.targets)
    busy = f"{found.decode.busy:.0%}"
    held = f"{found.decode.most_pages / found.decode.pages:.0%}"
    if found.prefill is not None:
        busy = f"{found.prefill.busy:.0%} + {busy}"
        held = f"{found.prefill.most_pages / found.prefill.pages:.0%} + {held}"
    failed = f", {one['failed']} failed" if one["failed"] else ""
    return (
        str(found.layout),
        shown(one["ttft_ms"]["p50"]),
        shown(one["ttft_ms"]["p99"]),
        shown(one["itl_ms"]["p50"]),
        shown(one["itl_ms"]["p99"]),
        shown(one["tpot_ms"]["mean"]),
        shown(one["output_tokens_per_second"], 0),
        shown(one["goodput_per_second"], 2),
        f"{one['goodput_part']:.1%}{failed}",
        busy,
        held,
    )


def _asked(question: Question) -> str:
    traffic = question.traffic
    counting = traffic.arrivals[traffic.first : traffic.last]
    prompt = sum(a.prompt for a in counting) / len(counting)
    output = sum(a.output for a in counting) / len(counting)
    return (
        f"{len(counting)} requests at {traffic.rate:.2f} a second, {prompt:,.0f} tokens in and {output:,.0f} "
        f"out on average; {_targets(question.goal)}"
    )


def _targets(goal: Goal) -> str:
    parts = [
        f"{name} {limit:g} ms"
        for name, limit in (("TTFT", goal.targets.ttft_ms), ("ITL", goal.targets.itl_ms))
        if limit is not None
    ]
    return f"{' and '.join(parts)} for {goal.part:.1%}" if parts else f"to be served: {goal.part:.1%}"


def sentence(question: Question, plan: Plan) -> str:
    """The recommendation."""
    best, targets = plan.best, question.goal.targets
    if best is None:
        closest = max(plan.tried, key=lambda each: each.met(targets), default=None)
        if closest is None:
            return f"More than {question.most} nodes are needed for the work alone; raise --max-nodes."
        met = closest.met(targets) / len(closest.records)
        return (
            f"No layout of at most {question.most} nodes meets the targets; {closest.layout} comes closest, "
            f"with {met:.1%} of the requests. Raise --max-nodes, or ask for less."
        )
    text = f"Take {_words(best)}: {_goodput(best, targets)}."
    other = plan.split if best is plan.aggregated else plan.aggregated
    tried_other = [each for each in plan.tried if bool(each.layout.prefill) != bool(best.layout.prefill)]
    if other is not None:
        text += f" {_words(other)} would do as well ({_goodput(other, targets)})."
    elif tried_other:
        kind = "Split" if best is plan.aggregated else "Aggregated"
        most = max(each.layout.nodes for each in tried_other)
        text += f" {kind}, {most} nodes do not meet the targets."
    return text


def _words(found: Simulated) -> str:
    layout = found.layout
    decode = f"{layout.decode} decode node{'s' if layout.decode > 1 else ''}"
    if not layout.prefill:
        return f"{decode} that {'prefill for themselves' if layout.decode > 1 else 'prefills for itself'}"
    mode = f" with --split {layout.split}" if layout.split != "auto" else ""
    return f"{layout.prefill} prefill and {decode}{mode}"


def _goodput(found: Simulated, targets: Targets) -> str:
    met = found.met(targets)
    part = met / len(found.records)
    return f"{met / found.seconds:.2f} requests a second meet the targets, {part:.1%} of all"


def report(question: Question, plan: Plan, commit: str, file: Path) -> None:
    """All figures as JSON."""
    goal, traffic = question.goal, question.traffic
    found: dict[str, Any] = about("plan", commit)
    found["profile"] = to_dict(question.setup.profile)
    found["targets"] = asdict(goal.targets) | {"part": goal.part}
    found["traffic"] = _traffic(traffic)
    found["layouts"] = [figures(each, goal.targets) for each in plan.tried]
    for name, each in (("best", plan.best), ("split", plan.split), ("aggregated", plan.aggregated)):
        found[name] = asdict(each.layout) if each is not None else None
    save(found, file)


def _traffic(traffic: Traffic) -> dict[str, Any]:
    counting = traffic.arrivals[traffic.first : traffic.last]
    return {
        "rate": traffic.rate,
        "requests": len(counting),
        "prompt_tokens": sum(arrival.prompt for arrival in counting),
        "output_tokens": sum(arrival.output for arrival in counting),
        "shared_prefix": traffic.shared_prefix,
    }
