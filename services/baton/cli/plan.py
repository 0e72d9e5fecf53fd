"""`baton plan`: how many nodes a traffic needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from baton.cli.bench_options import check_writable, count, report_options
from baton.cli.options import F, SectionedCommand, config_options, fields_of, given
from baton.cli.plan_report import report, show
from baton.config import DecodeConfig, PrefillConfig
from baton.gateway.routing import POLICIES
from baton.latency import Targets
from baton.plan.nodes import Setup
from baton.plan.profile import EngineFacts, Profile, read_profile
from baton.plan.search import Goal, Kinds, Plan, impossible, search
from baton.plan.simulation import Layout, Simulated, simulate
from baton.plan.traffic import Lengths, Traffic, poisson, read_trace

WORKER = ("kv_tokens", "max_rows", "token_budget", "context_length")
"""What may differ from the engine that was measured."""
POLICY = ("local_prefill_tokens", "message_seconds", "output_margin", "watermark")
DEFAULT_PROMPT, DEFAULT_OUTPUT = "1024", "256"


class LengthsType(click.ParamType):  # type: ignore[type-arg]
    name = "N|A-B|pX=N,pY=N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        if isinstance(value, Lengths):
            return value
        try:
            return Lengths.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True)
class Question:
    setup: Setup
    traffic: Traffic
    goal: Goal
    most: int
    kinds: Kinds


def answer(question: Question, console: Console) -> Plan:
    """Shows the progress of the search."""
    engine, cost = question.setup.profile.engine, question.setup.profile.step
    work = question.traffic.work(cost, engine.max_rows, engine.token_budget)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(question.traffic.arrivals))

        def run(layout: Layout) -> Simulated:
            progress.update(bar, description=f"simulating {layout}", completed=0)
            return simulate(
                layout, question.setup, question.traffic, lambda ended: progress.update(bar, completed=ended)
            )

        return search(work, question.goal, question.most, run, question.kinds)


def setup_of(profile: Profile, values: dict[str, Any], routing: str) -> Setup:
    """The profile's engine with what was given instead. Raises UsageError."""
    found = given(DecodeConfig, values)
    sizes = {name: found[name] for name in WORKER if found.get(name)}
    engine: EngineFacts = replace(profile.engine, **sizes)
    engine = replace(engine, context_length=min(engine.context_length, profile.engine.context_length))
    if engine.kv_tokens < engine.page_size:
        raise click.UsageError(f"--kv-tokens must be at least one page ({engine.page_size} tokens)")
    if not 1 <= engine.max_rows <= engine.token_budget:
        rows = f"--max-rows ({engine.max_rows})"
        raise click.UsageError(f"--token-budget ({engine.token_budget}) must be at least {rows}, and that 1")
    decode = DecodeConfig(**{name: found[name] for name in POLICY if name in found})
    return Setup(replace(profile, engine=engine), PrefillConfig(), decode, routing)


def traffic_of(
    setup: Setup, rate: float | None, prompt: Lengths | None, output: Lengths | None, trace: Path | None,
    requests: int, seed: int, shared: int,
) -> Traffic:  # fmt: skip
    """Raises UsageError or ClickException."""
    engine = setup.profile.engine
    context = min(engine.context_length, engine.kv_tokens // engine.page_size * engine.page_size)
    if trace is not None:
        if rate is not None or prompt is not None or output is not None:
            raise click.UsageError("--trace says when what arrives: leave out --rate, --prompt and --output")
        try:
            return read_trace(trace, context, shared)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    if rate is None:
        raise click.UsageError("say how many requests arrive per second (--rate), or give a --trace")
    lengths = (prompt or Lengths.parse(DEFAULT_PROMPT), output or Lengths.parse(DEFAULT_OUTPUT))
    for flag, each in zip(("--prompt", "--output"), lengths, strict=True):
        if not each.points and each.low >= context:
            raise click.UsageError(f"{flag}: {each.low} tokens do not fit into the context of {context}")
    return poisson(rate, *lengths, requests, seed, context, shared)


def _number(flag: str, default: float | None, text: str, metavar: str, **bounds: Any) -> Callable[[F], F]:
    kind = click.FloatRange(min=0, min_open=True, **bounds)
    shown = default is not None
    return click.option(flag, type=kind, default=default, show_default=shown, metavar=metavar, help=text)


@click.command(cls=SectionedCommand)
@click.argument("profile", metavar="PROFILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_number("--rate", None, "Requests per second (Poisson arrivals).", "X")
@click.option("--prompt", type=LengthsType(), help=f"Tokens of each prompt.  [default: {DEFAULT_PROMPT}]")
@click.option("--output", type=LengthsType(), help=f"Tokens of each output.  [default: {DEFAULT_OUTPUT}]")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help='Instead: a JSON list of {"at": seconds, "prompt": tokens, "output": tokens}.',
)
@count("--shared-prefix", 0, "Tokens that all prompts begin with.", least=0)
@_number("--ttft", None, "Time to first token, at most; none: any.", "MS")
@_number("--itl", None, "Between tokens, at most, for 99 % of a request's own; none: any.", "MS")
@_number("--goodput-part", 0.99, "Part of the requests that must meet both.", "X", max=1)
@count("--max-nodes", 16, "Prefill and decode nodes together, at most.")
@click.option(
    "--layouts",
    type=click.Choice(["both", "split", "aggregated"]),
    default="both",
    show_default=True,
    help="Split: prefill and decode nodes. Aggregated: decode nodes that compute prompts themselves.",
)
@click.option(
    "--split",
    type=click.Choice(["both", "auto", "always"]),
    default="both",
    show_default=True,
    help="Which prompts split layouts hand off (the gateway's --split). Both: always where auto fails.",
)
@click.option(
    "--routing", type=click.Choice(POLICIES), default="cache", show_default=True, help="The gateway's."
)
@count("--requests", 1000, "Simulated requests that count.", least=10)
@count("--seed", 0, "Of arrivals and lengths.", least=0)
@report_options
@config_options(
    DecodeConfig,
    leave_out=set(fields_of(DecodeConfig)).difference(WORKER, POLICY),
    defaults=dict.fromkeys(WORKER),
)
def plan(
    profile: Path, rate: float | None, prompt: Lengths | None, output: Lengths | None, trace: Path | None,
    shared_prefix: int, ttft: float | None, itl: float | None, goodput_part: float, max_nodes: int,
    layouts: str, split: str, routing: str, requests: int, seed: int, file: Path | None, commit: str,
    **values: Any,
) -> int:  # fmt: skip
    """How many nodes does a traffic need?

    PROFILE says what steps cost (`baton bench profile` measures it). The schedulers and hand-offs of `baton
    serve` then run in simulated time against one layout of nodes after the other, from the fewest that could
    do the work on, until the targets are met: by split nodes, and by aggregated ones, which prefill what they
    decode. Sizes not given are those of the engine that was measured.

    Lengths: tokens (512), an even range (100-1024), or percentiles (p50=300,p99=4000: log-normal).
    Goodput: requests per second that met both targets. Held: KV pages in use at once, at most, of a pool.
    Exits with 1 when no layout of at most --max-nodes meets the targets.

    \b
    Examples:
      baton bench profile --json profile.json
      baton plan profile.json --rate 8 --prompt 300-1200 --output 128 --ttft 400 --itl 40
      baton plan profile.json --rate 50 --prompt p50=800,p99=6000 --output p50=150,p99=900 --ttft 1000
      baton plan profile.json --trace monday.json --ttft 400 --itl 40 --goodput-part 0.95 --json plan.json
    """
    check_writable(file)
    try:
        measured = read_profile(profile)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    setup = setup_of(measured, values, routing)
    traffic = traffic_of(setup, rate, prompt, output, trace, requests, seed, shared_prefix)
    goal = Goal(Targets(ttft, itl), goodput_part)
    modes = ("auto", "always") if split == "both" else (split,)
    kinds = Kinds(modes if layouts != "aggregated" else (), layouts != "split")
    engine, host = setup.profile.engine, setup.profile.host
    if why := impossible(traffic, goal, measured.step, engine.token_budget, host.turn + host.row):
        raise click.ClickException(f"no number of nodes meets these targets: {why}")
    console = Console()
    question = Question(setup, traffic, goal, max_nodes, kinds)
    found = answer(question, console)
    if file is not None:
        report(question, found, commit, file)
    show(question, found, console)
    return 0 if found.best is not None else 1
