"""`baton demo` (`make demo`): the whole system at work, in under twenty seconds."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from baton.cli.console import Answer, collect_async, run_command, write
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.generate import stats_table
from baton.cli.up import process_table
from baton.cli.verify import topic_text
from baton.client import AsyncClient, Options

PREFIX_CHARACTERS = 2400
SAMPLING: Options = {"temperature": 0.0, "max_tokens": 48}


def questions() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, description, arguments of AsyncClient.stream."""
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
        ("chat", "What does textwrap.dedent do?", {"messages": "What does textwrap.dedent do?"}),
    ]


async def _demo(plan: DeploymentPlan, console: Console) -> int:
    answers: list[tuple[str, Answer]] = []
    async with Deployment(plan, console) as deployment:
        async with AsyncClient(deployment.address) as client:
            for name, shown, prompt in questions():
                console.print(f"\n[bold]{name}[/]: {shown}", highlight=False)
                answers.append((name, await collect_async(client.stream(**prompt, **SAMPLING), show=True)))
                write("\n")
        console.print()
        console.print(process_table(deployment.children))
        console.print()
        console.print(stats_table(answers))
    console.print("\nEverything is stopped again. Next: 'baton up', then 'baton chat'.")
    return 0


@click.command()
@click.option("--model", default="demo", show_default=True, metavar="TEXT", help="Path or Hugging Face id.")
@click.option("--verbose", "-v", is_flag=True, help="Print the processes' logs.")
def demo(model: str, verbose: bool) -> None:
    """Start a deployment, stream some answers, show what happened.

    Starts tokenizer, prefill, decode and gateway as separate processes on free ports, and streams three
    answers through the public gRPC API; the second prompt shares a long prefix with the first. Then prints
    the processes and the requests' latencies, and stops everything.

    \b
    Example:
      baton demo
    """
    settings = {role: {"model": model} for role in ("tokenizer", "prefill", "decode")}
    settings["gateway"] = {"split": "always"}
    plan = DeploymentPlan(settings=settings, restart=False, drain_seconds=1.0, verbose=verbose)
    console = Console()
    run_command(lambda: _demo(plan, console), server="the demo's gateway")
