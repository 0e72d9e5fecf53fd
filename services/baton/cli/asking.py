"""Many requests at a time, with a progress bar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.cli.answer import Answer, collect_async
from baton.client import AsyncClient


async def ask_all(
    client: AsyncClient, questions: Sequence[dict[str, Any]], concurrency: int, name: str, console: Console
) -> list[Answer]:
    """The answers in the order of the questions (arguments of AsyncClient.stream).

    Raises an ExceptionGroup of BatonError when a request fails; the others are then cancelled.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    slots = asyncio.Semaphore(concurrency)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=len(questions))

        async def one(question: dict[str, Any]) -> Answer:
            async with slots:
                answer = await collect_async(client.stream(**question))
            progress.advance(bar)
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(question)) for question in questions]
    return [task.result() for task in tasks]
