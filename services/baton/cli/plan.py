"""`baton plan`: how many nodes a given traffic needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from baton.cli.bench_options import Report, report_options
from baton.cli.config_fields import explicit_fields, fields_of
from baton.cli.console import UNLIMITED, progress_bar, shown, table
from baton.cli.options import (
    COUNT,
    SECONDS,
    SIZE,
    Parsed,
    SectionedCommand,
    config_options,
    option,
    options,
    take,
)
from baton.config import DecodeConfig, PrefillConfig
from baton.gateway.routing import POLICIES
from baton.sizing.nodes import NodeSetup
from baton.sizing.profile import EngineFacts, Profile, read_profile, to_dict
from baton.sizing.search import Goal, Kinds, Plan, impossible, layout_results, search
from baton.sizing.simulation import NodeLayout, Simulated, simulate
from baton.sizing.traffic import Lengths, Traffic, poisson, read_trace
from baton.slo import Targets

WORKER = ("kv_tokens", "max_rows", "token_budget", "context_length")
"""Sizes that may differ from the measured engine's."""
POLICY = ("local_prefill_tokens", "message_seconds", "output_margin", "watermark")
DEFAULT_PROMPT, DEFAULT_OUTPUT = "1024", "256"
LENGTHS = Parsed("N|A-B|pX=N,pY=N", Lengths.parse)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
COLUMNS = (
    *("layout", "TTFT p50", "p99, ms", "ITL p50", "p99, ms", "TPOT, ms", "tok/s out"),
    *("goodput", "met", "busy", "held"),
)


@dataclass(frozen=True, slots=True)
class PlanInput:
    setup: NodeSetup
    traffic: Traffic
    goal: Goal
    most: int
    kinds: Kinds


def run_search(plan_input: PlanInput, console: Console) -> Plan:
    """Searches, and shows the progress."""
    engine, cost = plan_input.setup.profile.engine, plan_input.setup.profile.step
    work = plan_input.traffic.work(cost, engine.max_rows, engine.token_budget)
    with progress_bar(console, transient=True) as progress:
        bar = progress.add_task("", total=len(plan_input.traffic.arrivals))

        def run(layout: NodeLayout) -> Simulated:
            progress.update(bar, description=f"simulating {layout}", completed=0)
            return simulate(
                layout,
                plan_input.setup,
                plan_input.traffic,
                lambda ended: progress.update(bar, completed=ended),
            )

        return search(work, plan_input.goal, plan_input.most, run, plan_input.kinds)


def setup_of(profile: Profile, values: dict[str, Any], routing: str) -> NodeSetup:
    """The profile's engine with the given sizes. Raises UsageError."""
    found = explicit_fields(DecodeConfig, values)
    sizes = {name: found[name] for name in WORKER if found.get(name)}
    engine: EngineFacts = replace(profile.engine, **sizes)
    engine = replace(engine, context_length=min(engine.context_length, profile.engine.context_length))
    if engine.kv_tokens < engine.page_size:
        raise click.UsageError(f"--kv-tokens must be at least one page ({engine.page_size} tokens)")
    if not 1 <= engine.max_rows <= engine.token_budget:
        rows = f"--max-rows ({engine.max_rows})"
        raise click.UsageError(
            f"--token-budget ({engine.token_budget}) must be at least {rows}, which is >= 1"
        )
    decode = DecodeConfig(**{name: found[name] for name in POLICY if name in found})
    return NodeSetup(replace(profile, engine=engine), PrefillConfig(), decode, routing)


def traffic_of(
    setup: NodeSetup,
    rate: float | None,
    prompt: Lengths | None,
    output: Lengths | None,
    trace: Path | None,
    requests: int,
    seed: int,
    shared: int,
) -> Traffic:
    """Raises UsageError or ClickException."""
    engine = setup.profile.engine
    context = engine.longest
    if trace is not None:
        if rate is not None or prompt is not None or output is not None:
            raise click.UsageError("--trace has times and lengths: leave out --rate, --prompt and --output")
        try:
            return read_trace(trace, context, shared)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    if rate is None:
        raise click.UsageError("give the requests per second (--rate), or a --trace")
    lengths = (prompt or Lengths.parse(DEFAULT_PROMPT), output or Lengths.parse(DEFAULT_OUTPUT))
    for flag, each in zip(("--prompt", "--output"), lengths, strict=True):
        if not each.points and each.low >= context:
            raise click.UsageError(f"{flag}: {each.low} tokens do not fit into the context of {context}")
    return poisson(rate, *lengths, requests, seed, context, shared)


def show(plan_input: PlanInput, plan: Plan, console: Console) -> None:
    """Rows in the order of the search."""
    goal = plan_input.goal
    console.print(_describe(plan_input), highlight=False, soft_wrap=True)
    if missing := plan_input.setup.profile.missing:
        text = (
            f"the profile has no {', '.join(missing)}: defaults are used; `baton bench profile` measures it"
        )
        console.print(text, style="yellow", highlight=False)
    rows = table(*COLUMNS)
    for found in plan.tried:
        rows.add_row(*_row(found, goal), style="bold" if found is plan.best else None)
    Console(file=console.file, width=UNLIMITED).print(rows)  # a narrow terminal wraps lines; no figure is cut
    console.print(recommendation(plan_input, plan), highlight=False, soft_wrap=True)


def _row(found: Simulated, goal: Goal) -> tuple[str, ...]:
    one = layout_results(found, goal.targets)
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


def _describe(plan_input: PlanInput) -> str:
    traffic = plan_input.traffic
    counting = traffic.arrivals[traffic.first : traffic.last]
    prompt = sum(a.prompt for a in counting) / len(counting)
    output = sum(a.output for a in counting) / len(counting)
    return (
        f"{len(counting)} requests at {traffic.rate:.2f} a second, {prompt:,.0f} tokens in and {output:,.0f} "
        f"out on average; {_targets(plan_input.goal)}"
    )


def _targets(goal: Goal) -> str:
    parts = [
        f"{name} {limit:g} ms"
        for name, limit in (("TTFT", goal.targets.ttft_ms), ("ITL", goal.targets.itl_ms))
        if limit is not None
    ]
    return f"{' and '.join(parts)} for {goal.part:.1%}" if parts else f"{goal.part:.1%} must finish"


def recommendation(plan_input: PlanInput, plan: Plan) -> str:
    """The recommendation."""
    best, targets = plan.best, plan_input.goal.targets
    if best is None:
        closest = max(plan.tried, key=lambda each: each.met(targets), default=None)
        if closest is None:
            return f"The work alone takes more than {plan_input.most} nodes; raise --max-nodes."
        met = closest.met(targets) / len(closest.records)
        return (
            f"No layout of at most {plan_input.most} nodes meets the targets; {closest.layout} comes closest "
            f"with {met:.1%} of the requests. Raise --max-nodes, or relax the targets."
        )
    text = f"Take {_words(best)}{_ranks(plan_input, best)}: {_goodput(best, targets)}."
    other = plan.split if best is plan.aggregated else plan.aggregated
    tried_other = [each for each in plan.tried if bool(each.layout.prefill) != bool(best.layout.prefill)]
    if other is not None:
        text += f" {_words(other)} would meet the targets too ({_goodput(other, targets)})."
    elif tried_other:
        kind = "Split" if best is plan.aggregated else "Aggregated"
        most = max(each.layout.nodes for each in tried_other)
        text += f" {kind}, {most} nodes do not meet the targets."
    return text


def _ranks(plan_input: PlanInput, found: Simulated) -> str:
    engine = plan_input.setup.profile.engine
    if engine.ranks == 1:
        return ""
    devices = "GPUs" if engine.device == "cuda" else "processes"
    return f", of {engine.ranks} ranks each ({engine.ranks * found.layout.nodes} {devices})"


def _words(found: Simulated) -> str:
    layout = found.layout
    decode = f"{layout.decode} decode node{'s' if layout.decode > 1 else ''}"
    if not layout.prefill:
        return f"{decode}, aggregated"
    mode = f" with --split {layout.split}" if layout.split != "auto" else ""
    return f"{layout.prefill} prefill and {decode}{mode}"


def _goodput(found: Simulated, targets: Targets) -> str:
    met = found.met(targets)
    part = met / len(found.records)
    return f"{met / found.seconds:.2f} requests a second meet the targets, {part:.1%} of all"


def report(plan_input: PlanInput, plan: Plan, output: Report) -> None:
    """All results as JSON."""
    goal, traffic = plan_input.goal, plan_input.traffic
    found: dict[str, Any] = output.begin("plan")
    found["profile"] = to_dict(plan_input.setup.profile)
    found["targets"] = asdict(goal.targets) | {"part": goal.part}
    found["traffic"] = _traffic(traffic)
    found["layouts"] = [layout_results(each, goal.targets) for each in plan.tried]
    for name, each in (("best", plan.best), ("split", plan.split), ("aggregated", plan.aggregated)):
        found[name] = asdict(each.layout) if each is not None else None
    output.save(found)


def _traffic(traffic: Traffic) -> dict[str, Any]:
    counting = traffic.arrivals[traffic.first : traffic.last]
    return {
        "rate": traffic.rate,
        "requests": len(counting),
        "prompt_tokens": sum(arrival.prompt for arrival in counting),
        "output_tokens": sum(arrival.output for arrival in counting),
        "shared_prefix": traffic.shared_prefix,
    }


@click.command(cls=SectionedCommand)
@click.argument("profile", metavar="PROFILE", type=EXISTING)
@options(
    option("--rate", SECONDS, None, "Requests per second (Poisson arrivals)."),
    option("--prompt", LENGTHS, None, f"Tokens of each prompt.  [default: {DEFAULT_PROMPT}]"),
    option("--output", LENGTHS, None, f"Tokens of each output.  [default: {DEFAULT_OUTPUT}]"),
    option(
        "--trace",
        EXISTING,
        None,
        'Instead: a JSON list of {"at": seconds, "prompt": tokens, "output": tokens}.',
    ),
    option("--shared-prefix shared", SIZE, 0, "Tokens with which all prompts begin."),
    option("--ttft ttft_ms", SECONDS, None, "Target: largest time to first token; none: any.", "MS"),
    option(
        "--itl itl_ms",
        SECONDS,
        None,
        "Target: largest time between tokens, for 99 % of a request's tokens; none: any.",
        "MS",
    ),
    option(
        "--goodput-part",
        click.FloatRange(min=0, min_open=True, max=1),
        0.99,
        "Part of the requests that must meet both targets.",
    ),
    option("--max-nodes", COUNT, 16, "Most prefill and decode nodes together."),
    option(
        "--layouts",
        click.Choice(["both", "split", "aggregated"]),
        "both",
        "Split: prefill and decode nodes. Aggregated: decode nodes that compute prompts themselves.",
    ),
    option(
        "--split",
        click.Choice(["both", "auto", "always"]),
        "both",
        "Which prompts split layouts hand off (the gateway's --split). Both: auto, then always.",
    ),
    option("--routing", click.Choice(POLICIES), "cache", "The gateway's --routing."),
    option("--requests", click.IntRange(10), 1000, "Simulated requests that are counted."),
    option("--seed", SIZE, 0, "Seed of arrivals and lengths."),
    report_options,
    config_options(
        DecodeConfig,
        leave_out=set(fields_of(DecodeConfig)).difference(WORKER, POLICY),
        defaults=dict.fromkeys(WORKER),
    ),
)
def plan(
    profile: Path,
    rate: float | None,
    prompt: Lengths | None,
    output: Lengths | None,
    trace: Path | None,
    shared: int,
    goodput_part: float,
    max_nodes: int,
    layouts: str,
    split: str,
    routing: str,
    requests: int,
    seed: int,
    **values: Any,
) -> int:
    """Find how many nodes a given traffic needs.

    PROFILE has the costs of steps; `baton bench profile` measures it. The schedulers and hand-offs of `baton
    serve` run in simulated time on one layout of nodes after the other, from the fewest nodes that could do
    the work on, until the targets are met: by split nodes, and by aggregated ones, which compute the prompts
    that they decode. Sizes that are not given are those of the measured engine.

    Lengths: tokens (512), an even range (100-1024), or percentiles (p50=300,p99=4000: log-normal). Goodput:
    requests per second that met both targets. Held: largest part of a KV pool in use at a time. Exits with 1
    if no layout of at most --max-nodes meets the targets.

    \b
    Examples:
      baton bench profile --json profile.json
      baton plan profile.json --rate 8 --prompt 300-1200 --output 128 --ttft 400 --itl 40
      baton plan profile.json --rate 50 --prompt p50=800,p99=6000 --output p50=150,p99=900 --ttft 1000
      baton plan profile.json --trace monday.json --ttft 400 --itl 40 --goodput-part 0.95 --json plan.json
    """
    results = take(Report, values)
    results.check_writable()
    goal = Goal(take(Targets, values), goodput_part)
    try:
        measured = read_profile(profile)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    setup = setup_of(measured, values, routing)
    traffic = traffic_of(setup, rate, prompt, output, trace, requests, seed, shared)
    modes = ("auto", "always") if split == "both" else (split,)
    kinds = Kinds(modes if layouts != "aggregated" else (), layouts != "split")
    engine, host = setup.profile.engine, setup.profile.host
    if why := impossible(traffic, goal, measured.step, engine.token_budget, host.turn + host.row):
        raise click.ClickException(f"no number of nodes meets these targets: {why}")
    console = Console()
    plan_input = PlanInput(setup, traffic, goal, max_nodes, kinds)
    found = run_search(plan_input, console)
    report(plan_input, found, results)
    show(plan_input, found, console)
    return 0 if found.best is not None else 1
