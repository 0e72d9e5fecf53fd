"""`baton sim`: the deterministic simulator, one seed or many."""

from __future__ import annotations

import itertools
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import TextColumn

from baton.cli.console import progress_bar
from baton.cli.options import COUNT, FILE, SECONDS, SIZE, Parsed, option, options
from baton.sim.run import Outcome, run_many, run_scenario
from baton.sim.scenario import make_scenario

LINE_SECONDS = 10.0
"""Interval of progress lines without a terminal."""


def _range(text: str) -> range:
    """Parses `A-B`, both ends included."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"{text!r} is no range of seeds such as 0-1999")
    return range(int(match[1]), int(match[2]) + 1)


@click.command()
@options(
    option("--seed", SIZE, None, "One run. Default: a random seed, which is printed."),
    option("--seeds", Parsed("A-B", _range), None, "Run all of these, on all cores.", "A-B"),
    option("--seconds", SECONDS, None, "Run seeds from --from on for this time."),
    option("--from first", SIZE, None, "First seed with --seconds.  [default: random]"),
    option("--steps", COUNT, None, "End a run after this many events, without the checks at its end."),
    option("--trace", FILE, None, "Write every event of one run to this file."),
    option("--jobs", COUNT, None, "Processes for many seeds.  [default: one per core]"),
)
def sim(
    seed: int | None,
    seeds: range | None,
    seconds: float | None,
    first: int | None,
    steps: int | None,
    trace: Path | None,
    jobs: int | None,
) -> int:
    """Run the real core of all processes in simulated time, with faults, from a seed.

    Networks delay, break and partition; processes crash, stall and restart; clients cancel. Every token is
    compared with a reference, and every rule of docs/design.md is checked at every step. The same seed gives
    the same run, event for event. Exits with 1 if a rule was broken.

    \b
    Examples:
      baton sim --seed 7                        one run
      baton sim --seeds 0-1999                  two thousand
      baton sim --seconds 600                   as many as fit into ten minutes
      baton sim --seed 7 --trace run.txt        with all its events
    """
    if sum(option is not None for option in (seed, seeds, seconds)) > 1:
        raise click.UsageError("--seed, --seeds and --seconds exclude each other: give one")
    if seeds is None and seconds is None:
        return _one(secrets.randbits(32) if seed is None else seed, steps, trace)
    if trace is not None:
        raise click.UsageError("--trace is for one run: give --seed")
    start = secrets.randbits(32) if first is None else first
    source: Iterable[int] = seeds if seeds is not None else itertools.count(start)
    outcomes = run_many(source, max_steps=steps, jobs=jobs, seconds=seconds)
    return _many(outcomes, len(seeds) if seeds is not None else None, start if seeds is None else None)


def _one(seed: int, steps: int | None, trace: Path | None) -> int:
    scenario = make_scenario(seed)
    outcome = run_scenario(scenario, steps)
    click.echo(str(outcome))
    if trace is not None:
        with trace.open("w") as file:
            run_scenario(scenario, steps, lambda line: print(line, file=file))
    return 1 if outcome.failure else 0


def _many(outcomes: Iterable[Outcome], total: int | None, start: int | None) -> int:
    ends: Counter[str] = Counter()
    runs = failed = tokens = 0
    with _SeedProgress(total) as advance:
        for outcome in outcomes:
            runs += 1
            tokens += outcome.tokens
            ends.update(outcome.requests)
            if outcome.failure:
                failed += 1
                click.echo(f"{outcome}; replay: baton sim --seed {outcome.seed} --trace FILE")
            advance(failed)
    where = f" from seed {start} on" if start is not None else ""
    requests = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    click.echo(
        f"{runs} runs{where}: {failed or 'none'} failed; {tokens} tokens compared; requests: {requests}"
    )
    return 1 if failed else 0


class _SeedProgress:
    """A bar on a terminal, else a line every LINE_SECONDS; on stderr."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._runs = 0
        self._printed = time.monotonic()
        self._bar = progress_bar(Console(stderr=True), TextColumn("{task.fields[failed]} failed"))

    def __enter__(self) -> Callable[[int], None]:
        if sys.stderr.isatty():
            self._bar.add_task("seeds", total=self._total, failed=0)
            self._bar.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _advance(self, failed: int) -> None:
        self._runs += 1
        for task in self._bar.task_ids:
            self._bar.update(task, advance=1, failed=failed)
        if not self._bar.task_ids and time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            of = f" of {self._total}" if self._total is not None else ""
            click.echo(f"{self._runs} runs{of}, {failed} failed", err=True)
