"""`baton generate`: the continuation of one prompt, streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table

from baton.cli.answer import Answer, collect, explain, milliseconds, size, write
from baton.cli.options import F, fail
from baton.cli.status import server_option
from baton.client import BatonError, Client, Options


def sampling_options(function: F) -> F:
    """The sampling parameters that people change; what is not given is the server's default."""
    flags: list[Callable[[Any], Any]] = [
        click.option(
            "--max-tokens",
            type=int,
            metavar="N",
            default=256,
            show_default=True,
            help="Output tokens at most.",
        ),
        click.option(
            "--temperature",
            type=float,
            metavar="X",
            help="0 is greedy; higher is more varied.  [default: 1.0]",
        ),
        click.option("--top-p", type=float, metavar="X", help="Keep the likeliest tokens up to this sum."),
        click.option("--top-k", type=int, metavar="N", help="Keep the N likeliest tokens."),
        click.option("--seed", type=int, metavar="N", help="The same seed gives the same text."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    ]
    for flag in reversed(flags):
        function = flag(function)
    return function


def options(sampling: dict[str, Any]) -> Options:
    """What was given of the flags of `sampling_options`."""
    return cast(Options, {name: value for name, value in sampling.items() if value not in (None, ())})


def stats_table(answers: list[tuple[str, Answer]]) -> Table:
    """One row a request: latencies; prompt tokens and how many of them were found cached; output tokens; what
    was pulled and over which transport (nothing when the decode node computed the prompt itself)."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request", no_wrap=True)
    for column in ("TTFT", "TPOT", "prompt", "cached", "output", "pages", "bytes", "via"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, answer in answers:
        stats, usage = answer.stats, answer.usage
        table.add_row(
            name,
            milliseconds(answer.ttft),
            milliseconds(answer.tpot),
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.output_tokens),
            str(stats.pulled_pages),
            size(stats.pulled_bytes),
            stats.transport or "-",
        )
    return table


@click.command()
@click.argument("prompt")
@server_option
@click.option("--chat", is_flag=True, help="Send the prompt as a chat message, through the model's template.")
@sampling_options
@click.option("--stats", is_flag=True, help="Latencies, tokens and cache hits, to stderr.")
def generate(prompt: str, server: str, chat: bool, stats: bool, **sampling: Any) -> None:
    """Stream the continuation of PROMPT to stdout; '-' reads it from stdin.

    \b
    Examples:
      baton generate "textwrap.dedent(text)" --max-tokens 64
      baton generate "Hello!" --chat --temperature 0 --stats
      baton generate - < prompt.txt
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    question: dict[str, Any] = {"messages": text} if chat else {"prompt": text}
    try:
        with Client(server) as client, client.stream(**question, **options(sampling)) as stream:
            answer = collect(stream, show=True)
    except BatonError as error:
        fail(explain(error, server))
    write("\n")
    if stats:
        Console(stderr=True).print(stats_table([("generate", answer)]))
