"""Options of `baton bench serve` that say what is asked."""

from __future__ import annotations

from typing import Any

import click

from baton.bench.workload import KINDS
from baton.cli.bench_options import Tokens, count
from baton.cli.options import F

FIELDS = (
    "kind",
    "prompt_tokens",
    "opening",
    "turns",
    "think",
    "documents",
    "question_tokens",
    "output_tokens",
    "shared_prefix",
    "temperature",
)
"""Of a Workload, and the options' names."""


def workload_options(function: F) -> F:
    for add in reversed(
        (
            click.option(
                "--workload",
                "kind",
                type=click.Choice(KINDS),
                default="random",
                show_default=True,
                help="Prompts that share nothing; conversations of some turns; questions on long documents.",
            ),
            click.option(
                "--prompt-tokens",
                type=Tokens(),
                default="1024",
                show_default=True,
                help="Of each prompt, each turn of a conversation, or each document (random ones).",
            ),
            click.option(
                "--opening-tokens",
                "opening",
                type=click.IntRange(0),
                default=0,
                show_default=True,
                metavar="N",
                help="That a conversation's first turn has more.",
            ),
            click.option(
                "--turns",
                type=Tokens(),
                default="3-9",
                show_default=True,
                help="Of a conversation, if the context holds them.",
            ),
            click.option(
                "--think-seconds",
                "think",
                type=click.FloatRange(0),
                default=2.0,
                show_default=True,
                metavar="X",
                help="From an answer to the next turn, on average.",
            ),
            count("--documents", 16, "Documents that questions are about."),
            click.option(
                "--question-tokens",
                type=Tokens(),
                default="16-64",
                show_default=True,
                help="Behind a document.",
            ),
            click.option(
                "--output-tokens",
                type=Tokens(),
                default="256",
                show_default=True,
                help="Of each output; the model's end of sequence is ignored.",
            ),
            count("--shared-prefix", 0, "Tokens that all prompts begin with.", least=0),
            click.option(
                "--temperature",
                type=click.FloatRange(0),
                default=0.0,
                show_default=True,
                metavar="X",
                help="Of sampling.",
            ),
        )
    ):
        function = add(function)
    return function


def take_workload(values: dict[str, Any]) -> dict[str, Any]:
    """Removes the options' values; returns them."""
    return {name: values.pop(name) for name in FIELDS}
