"""`baton bench`: latency and throughput of a deployment."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from baton import __version__
from baton.cli.answer import Answer, milliseconds, percentile
from baton.cli.asking import ask_all
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.options import F, SectionedCommand, config_options, fields_of
from baton.cli.running import run_command
from baton.cli.texts import random_prompt
from baton.cli.up import OWN, fetch_model, pass_through
from baton.client import AsyncClient, Options
from baton.config import NodeConfig, WorkerConfig

PERCENTILES = (0.5, 0.9, 0.99)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. Lengths are in tokens."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int
    seed: int

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random token ids; all begin with the same `shared_prefix` tokens."""
        prefix = random_prompt(self.shared_prefix, vocabulary, self.seed)
        seeds = range(self.seed + 1, self.seed + 1 + self.requests)
        return [random_prompt(self.prompt_tokens, vocabulary, seed, prefix) for seed in seeds]


async def run_workload(address: str, work: Workload, console: Console) -> tuple[list[Answer], float]:
    """The answers, and the seconds that all of them took together. One request goes ahead, unmeasured."""
    async with AsyncClient(address) as client:
        vocabulary = (await client.models())[0].vocab_size
        await client.generate(token_ids=random_prompt(16, vocabulary, work.seed - 1), max_tokens=2)
        sampling: Options = {"temperature": 0.0, "max_tokens": work.output_tokens, "ignore_eos": True}
        questions: list[dict[str, Any]] = [
            {"token_ids": prompt, **sampling} for prompt in work.prompts(vocabulary)
        ]
        started = time.monotonic()
        answers = await ask_all(client, questions, work.concurrency, "requests", console)
        return answers, time.monotonic() - started


def summarize(work: Workload, answers: list[Answer], seconds: float) -> dict[str, Any]:
    """All figures, in seconds and tokens per second."""
    samples = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [answer.tpot for answer in answers],
        "itl": [gap for answer in answers for gap in answer.itl],
    }
    output = sum(answer.usage.output_tokens for answer in answers)
    prompt = sum(answer.usage.prompt_tokens for answer in answers)
    return {
        "baton": __version__,
        "machine": f"{platform.machine()} {platform.system()}",
        "workload": dataclasses.asdict(work),
        "seconds": seconds,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(answer.usage.cached_tokens for answer in answers),
        "output_tokens_per_second": output / seconds,
        "prompt_tokens_per_second": prompt / seconds,
        "requests_per_second": len(answers) / seconds,
        "pulled_pages": sum(answer.stats.pulled_pages for answer in answers),
        **{
            f"{name}_seconds": {f"p{round(p * 100)}": percentile(values, p) for p in PERCENTILES}
            for name, values in samples.items()
        },
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """A table of latencies and a line of rates."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "p50", "p90", "p99"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("ttft", "tpot", "itl"):
        table.add_row(name.upper(), *(milliseconds(value) for value in figures[f"{name}_seconds"].values()))
    console.print(table)
    console.print(
        f"{figures['output_tokens']} tokens in {figures['seconds']:.2f} s: "
        f"{figures['output_tokens_per_second']:.1f} output tokens/s, "
        f"{figures['requests_per_second']:.2f} requests/s; "
        f"{figures['cached_tokens']} of {figures['prompt_tokens']} prompt tokens cached, "
        f"{figures['pulled_pages']} pages pulled",
        highlight=False,
    )


def save(figures: dict[str, Any], file: Path) -> None:
    """As JSON."""
    file.write_text(json.dumps(figures, indent=2) + "\n")


async def _bench(
    server: str, plan: DeploymentPlan, work: Workload, file: Path | None, console: Console
) -> int:
    if server:
        answers, seconds = await run_workload(server, work, console)
    else:
        async with Deployment(plan, console) as deployment:
            answers, seconds = await run_workload(deployment.address, work, console)
    figures = summarize(work, answers, seconds)
    show(figures, console)
    if file is not None:
        save(figures, file)
    return 0


def _count(flag: str, default: int, text: str, least: int = 1) -> Callable[[F], F]:
    return click.option(
        flag, type=click.IntRange(least), default=default, show_default=True, metavar="N", help=text
    )


@click.command(cls=SectionedCommand)
@click.option(
    "--server",
    default="",
    metavar="HOST:PORT",
    envvar="BATON_SERVER",
    help="A running deployment's gateway; without it one is started for the benchmark.",
)
@_count("--requests", 32, "Requests.")
@_count("--concurrency", 8, "Requests at a time.")
@_count("--prompt-tokens", 256, "Tokens of each prompt (random ones).")
@_count("--output-tokens", 64, "Tokens of each output; the model's end of sequence is ignored.")
@_count("--shared-prefix", 0, "Tokens that all prompts begin with.", least=0)
@_count("--seed", 0, "Of the prompts.", least=0)
@_count("--prefill", 1, "Prefill nodes of the deployment that is started; 0: aggregated.", least=0)
@_count("--decode", 1, "Its decode nodes.")
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write all figures there.",
)
@config_options(WorkerConfig, leave_out=fields_of(NodeConfig))
def bench(
    server: str, requests: int, concurrency: int, prompt_tokens: int, output_tokens: int, shared_prefix: int,
    seed: int, prefill: int, decode: int, file: Path | None, **values: Any,
) -> None:  # fmt: skip
    """Measure TTFT, TPOT, ITL and tokens per second.

    TTFT: seconds to the first token. TPOT: mean seconds per output token, the first excluded. ITL: seconds
    between tokens. All are measured at the client.

    \b
    Examples:
      baton bench                                         start a deployment of the demo model
      baton bench --server 127.0.0.1:50050 --requests 200 --concurrency 32
      baton bench --prompt-tokens 1024 --shared-prefix 960 --json figures.json
    """
    values = {name: value for name, value in values.items() if name not in OWN}
    fetch_model(values)
    plan = DeploymentPlan(
        prefill=prefill, decode=decode, http_port=None, flags=pass_through(values), restart=False
    )
    work = Workload(requests, concurrency, prompt_tokens, output_tokens, shared_prefix, seed)
    console = Console()
    run_command(lambda: _bench(server, plan, work, file, console), server=server)
