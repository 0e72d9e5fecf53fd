"""`baton verify`: a split deployment against an aggregated one, token for token."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import click
from rich.console import Console

from baton.cli.console import StreamedAnswer, collect_async, progress_bar, run_command, table
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.options import COUNT, PROCESS, SectionedCommand, config_options, option, options
from baton.cli.up import check_workers, settings_by_role
from baton.client import AsyncClient, Options
from baton.config import WorkerConfig

LENGTHS = (20, 2400, 300, 1200, 80, 3600, 600, 160)
"""Characters of prompts; short and long ones share batches."""


def topic_prompts(count: int) -> list[str]:
    """`count` different prompts of mixed lengths. Every fourth begins like the one before it, so that prefix
    caches are used."""
    names = sorted(topics)
    prompts: list[str] = []
    for i in range(count):
        text = " ".join(topics[names[i * 7 % len(names)]].split())
        length = LENGTHS[i % len(LENGTHS)]
        if i % 4 == 3:
            prompts.append(f"{prompts[-1]} {text}"[: len(prompts[-1]) + length])
        else:
            prompts.append(f"{i}. {text}"[:length])
    return prompts


def topic_text(name: str, characters: int) -> str:
    """Python's documentation from a topic on, cut to `characters`."""
    names = sorted(topics)
    start = names.index(name)
    return "\n\n".join(topics[other].strip() for other in names[start : start + 8])[:characters]


async def run_requests(
    client: AsyncClient, requests: Sequence[dict[str, Any]], concurrency: int, name: str, console: Console
) -> list[StreamedAnswer]:
    """Answers in the order of the requests, which are arguments of AsyncClient.stream.

    If a request fails the others are cancelled; raises an ExceptionGroup of BatonError.
    """
    limit = asyncio.Semaphore(concurrency)
    with progress_bar(console) as progress:
        bar = progress.add_task(name, total=len(requests))

        async def one(request: dict[str, Any]) -> StreamedAnswer:
            async with limit:
                answer = await collect_async(client.stream(**request))
            progress.advance(bar)
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]


MODES: dict[str, Options] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One request of the comparison."""

    mode: str
    prompt: str
    sampling: Options


def make_cases(prompts: int, max_tokens: int) -> list[Case]:
    """Each prompt twice: greedy, and sampled with a seed."""
    cases = []
    for mode, parameters in MODES.items():
        for i, prompt in enumerate(topic_prompts(prompts)):
            sampling: Options = {**parameters, "max_tokens": max_tokens, "seed": i + 1, "ignore_eos": True}
            cases.append(Case(mode, prompt, sampling))
    return cases


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """Answers of one deployment."""

    token_ids: list[list[int]]
    cached_tokens: int
    pulled_pages: int


async def run_side(
    name: str, client: AsyncClient, cases: list[Case], concurrency: int, console: Console
) -> Side:
    """Runs all cases, `concurrency` at a time. Closes the client."""
    requests: list[dict[str, Any]] = [{"prompt": case.prompt, **case.sampling} for case in cases]
    async with client:
        answers = await run_requests(client, requests, concurrency, name, console)
    return Side(
        [answer.completion.token_ids for answer in answers],
        sum(answer.usage.cached_tokens for answer in answers),
        sum(answer.stats.pulled_pages for answer in answers),
    )


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Position of the first different token; None if the sequences are equal."""
    for i, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def report(cases: list[Case], split: Side, aggregated: Side, console: Console) -> int:
    """Prints the comparison; returns how many requests differ."""
    rows = table("mode", "requests", "tokens", "equal", "different")
    differences: list[str] = []
    for mode in MODES:
        chosen = [i for i, case in enumerate(cases) if case.mode == mode]
        different = 0
        for i in chosen:
            position = first_difference(split.token_ids[i], aggregated.token_ids[i])
            if position is not None:
                different += 1
                differences.append(
                    f"{mode}, prompt {cases[i].prompt[:32]!r}: output token {position} differs: "
                    f"{split.token_ids[i][position : position + 4]} split, "
                    f"{aggregated.token_ids[i][position : position + 4]} aggregated"
                )
        tokens = sum(len(split.token_ids[i]) for i in chosen)
        rows.add_row(mode, str(len(chosen)), str(tokens), str(len(chosen) - different), str(different))
    console.print(rows)
    console.print(
        f"Split: {split.pulled_pages} pages pulled, {split.cached_tokens} prompt tokens found cached. "
        f"Aggregated: {aggregated.pulled_pages} and {aggregated.cached_tokens}.",
        highlight=False,
    )
    for line in differences:
        console.print(line, highlight=False, markup=False, style="red")
    return len(differences)


async def _verify(
    plan: DeploymentPlan, against: str, cases: list[Case], concurrency: int, console: Console
) -> int:
    async def run(name: str, prefill: int) -> Side:
        console.print(f"Starting a deployment: {name}")
        async with Deployment(dataclasses.replace(plan, prefill=prefill), console) as deployment:
            client = AsyncClient(deployment.address, api_key="", tls_ca="")
            return await run_side(name, client, cases, concurrency, console)

    if against:
        split = await run_side(against, AsyncClient(against), cases, concurrency, console)
    else:
        split = await run("split", max(1, plan.prefill))
    aggregated = await run("aggregated", 0)
    if not any(split.token_ids):
        console.print("No request produced a token: nothing was compared.", style="red")
        return 1
    different = report(cases, split, aggregated, console)
    if different:
        console.print(f"{different} of {len(cases)} requests differ.", style="red")
    else:
        console.print("Equal, token for token.", style="green")
    return 1 if different else 0


@click.command(cls=SectionedCommand)
@options(
    option("--prompts", COUNT, 16, "Prompts; each is sent twice: greedy, and with a seed."),
    option("--max-tokens", COUNT, 32, "Output tokens of each."),
    option("--concurrency", COUNT, 8, "Requests at a time."),
    option("--prefill prefill_nodes", COUNT, 1, "Prefill nodes of the split deployment."),
    option("--decode decode_nodes", COUNT, 1, "Decode nodes of each deployment."),
    option(
        "--against",
        str,
        "",
        "Compare this running deployment, of the same --model, instead of starting a split one.",
        "HOST:PORT",
    ),
)
@config_options(WorkerConfig, leave_out=PROCESS)
def verify(
    prompts: int, max_tokens: int, concurrency: int, prefill_nodes: int, decode_nodes: int, against: str,
    **values: Any,
) -> None:  # fmt: skip
    """Compare split with aggregated, token for token.

    Starts a split and an aggregated deployment of the same model, one after the other, sends both the same
    prompts (short and long, with shared prefixes) and compares every token. Exits with 1 on any difference.

    \b
    Examples:
      baton verify
      baton verify --model ./my-model --prompts 64 --max-tokens 128
      baton verify --transports grpc
      baton verify --against 127.0.0.1:50050
    """
    settings = settings_by_role(values)
    check_workers(settings)
    settings["gateway"]["split"] = "always"
    plan = DeploymentPlan(
        prefill=prefill_nodes, decode=decode_nodes, http_port=None, settings=settings, restart=False
    )
    cases = make_cases(prompts, max_tokens)
    console = Console()
    run_command(lambda: _verify(plan, against, cases, concurrency, console), server=against)
