"""Options that the measurements of `baton bench` share, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from baton.bench.workload import Range
from baton.cli.deployment import DeploymentPlan
from baton.cli.options import F, build, given
from baton.cli.up import OWN, fetch_model, pass_through
from baton.config import WorkerConfig


class Tokens(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens or a range of them."""

    name = "N|A-B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Range:
        if isinstance(value, Range):
            return value
        try:
            return Range.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers of 1 or more with commas between."""

    name = "N[,N...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(item) for item in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: give whole numbers with commas between", param, ctx)
        if min(found) < 1:
            self.fail(f"{value!r}: each must be 1 or more", param, ctx)
        return found


def count(flag: str, default: int | None, text: str, least: int = 1) -> Callable[[F], F]:
    """An option that is a whole number."""
    shown = default is not None
    return click.option(
        flag, type=click.IntRange(least), default=default, show_default=shown, metavar="N", help=text
    )


def deployment_options(timeout: float) -> Callable[[F], F]:
    """`--server`, `--prefill`, `--decode`, `--clients`, `--warmup`, and `--timeout` with its default."""

    def decorate(function: F) -> F:
        for add in reversed(
            (
                click.option(
                    "--server",
                    default="",
                    metavar="HOST:PORT",
                    envvar="BATON_SERVER",
                    help="A running deployment's gateway; without it one is started for the measurement.",
                ),
                count("--prefill", 1, "Prefill nodes of the one that is started; 0: aggregated.", least=0),
                count("--decode", 1, "Its decode nodes."),
                count("--clients", 1, "Client processes; more when one is the limit."),
                count("--warmup", 4, "Requests ahead, of the same sizes, not measured.", least=0),
                click.option(
                    "--timeout",
                    type=click.FloatRange(min=0, min_open=True),
                    default=timeout,
                    show_default=True,
                    metavar="SECONDS",
                    help="What a request may take; later it counts as failed. The gateway has a limit too.",
                ),
            )
        ):
            function = add(function)
        return function

    return decorate


def report_options(function: F) -> F:
    """`--json` (argument `file`) and `--commit`."""
    for add in (
        click.option(
            "--commit", default="", metavar="TEXT", help="Noted in the figures.  [default: the checkout's]"
        ),
        click.option(
            "--json",
            "file",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Write all figures there.",
        ),
    ):
        function = add(function)
    return function


def make_plan(values: dict[str, Any], prefill: int, decode: int) -> DeploymentPlan:
    """Of the engine's flags. Ends the command with one line when there is no such model."""
    values = {name: value for name, value in values.items() if name not in OWN}
    fetch_model(values)
    return DeploymentPlan(
        prefill=prefill, decode=decode, http_port=None, flags=pass_through(values), restart=False
    )


def engine_config(
    values: dict[str, Any], defaults: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: {}
) -> WorkerConfig:
    """Of the engine's flags; `defaults` says what replaces the configuration's own. Ends the command with one
    line when there is no such model."""
    from baton.checkpoint import CheckpointError
    from baton.models.config import ModelError

    values = {name: value for name, value in values.items() if name not in OWN}
    fetch_model(values)
    try:
        return build(WorkerConfig, values, defaults(given(WorkerConfig, values)))
    except (CheckpointError, ModelError) as error:
        raise click.ClickException(str(error)) from None


def check_writable(*files: Path | None) -> None:
    """Before anything is measured. Raises UsageError."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"there is no folder {file.absolute().parent} to write {file.name} to")
