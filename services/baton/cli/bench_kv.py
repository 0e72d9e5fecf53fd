"""`baton bench kv`: how fast KV pages travel between two processes of this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from baton.bench.kv_transfer import PAGE_DTYPES, KvBench, fitting, layout_of
from baton.bench.machine import visible_gpus
from baton.bench.pools import ONE_EACH, RankCounts
from baton.bench.processes import BenchError
from baton.cli.bench_options import NUMBERS, Report
from baton.cli.console import progress_bar, run_command, table
from baton.cli.options import COUNT, FILE, SIZE, Parsed, SectionedCommand, fail, option, options
from baton.model_path import CheckpointError
from baton.models.config import ModelError
from baton.transport import SegmentError, TransportError


def show(results: dict[str, Any], console: Console) -> None:
    """A row for each length and method; adjacent pages, which are one copy, show the link's rate."""
    rows = table("tokens", "MB", "how", "ms", "GB/s", "of adjacent")
    rows.columns[0].justify, rows.columns[2].justify = "right", "left"
    rates = results["rates"]
    reference = rates[0]["method"]
    for tokens in sorted({rate["tokens"] for rate in rates}):
        of_length = [rate for rate in rates if rate["tokens"] == tokens]
        link = next(rate["gigabytes_per_second"] for rate in of_length if rate["method"] == reference)
        for number, rate in enumerate(of_length):
            speed = rate["gigabytes_per_second"]
            head = (f"{tokens:,}", f"{rate['bytes'] / 1e6:.1f}") if number == 0 else ("", "")
            row = (rate["method"], f"{rate['seconds'] * 1e3:.2f}", f"{speed:.1f}", f"{speed / link:.0%}")
            rows.add_row(*head, *row)
    console.print(rows)
    for one in results["decode_load"]:
        text = f"decode-like load during pulls ({one['method']}): {one['factor']:.2f} times slower"
        console.print(text, highlight=False)


async def _kv(bench: KvBench, output: Report, console: Console) -> int:
    with progress_bar(console) as progress:
        bar = progress.add_task("starting the owner", total=None)

        def on_progress(method: str, total: int) -> None:
            progress.update(bar, description=method, total=total, advance=1)

        try:
            results = await bench.run(on_progress)
        except (SegmentError, TransportError, BenchError) as error:
            fail(str(error))
    show(results, console)
    output.save(output.begin("kv") | results)
    return 0


def _ranks(text: str) -> RankCounts:
    found = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", text)
    if not found:
        raise ValueError("give the owner's and the receiver's number of ranks, such as 1:2")
    return int(found[1]), int(found[2])


def _devices(name: str, same_gpu: bool, ranks: RankCounts) -> tuple[torch.device, str]:
    """The receiver's device, and the owner's GPUs: from the last one on, where the receiver's are the first
    ones."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu" and ranks != ONE_EACH:
        fail("--ranks: pools of several ranks are those of GPUs; leave it out", code=2)
    if name == "cpu":
        return torch.device("cpu"), ""
    if not torch.cuda.is_available():
        fail(f"--device {name}: torch sees no CUDA device; use --device cpu", code=2)
    gpus = visible_gpus()
    if same_gpu:
        return torch.device("cuda", 0), gpus[0]
    others = [*gpus[1:], gpus[0]]
    return torch.device("cuda", 0), ",".join(others[: ranks[0]])


@click.command(cls=SectionedCommand)
@options(
    option("--model", str, "demo", "Model whose pages are pulled: a path or an id.", "TEXT"),
    option("--device", click.Choice(["auto", "cpu", "cuda"]), "auto", "Device of both pools."),
    option("--dtype", click.Choice(["auto", *PAGE_DTYPES]), "auto", "Of the pages."),
    option("--page-size", SIZE, 0, "Tokens per page; 0: a worker's default."),
    option("--tokens lengths", NUMBERS, "128,512,2048,8192,32768", "Prompt lengths.", "N,..."),
    option("--repeats", COUNT, 7, "Pulls of each length; the median is reported."),
    option("--quotas", NUMBERS, "8,32", "Numbers of blocks of the copy kernel (GPU).", "N,..."),
    option("--ranks", Parsed("N:N", _ranks), "1:1", "Of the owner and the receiver, with a GPU each.", "N:N"),
    click.option("--same-gpu", is_flag=True, help="Put both pools on one GPU even if there are two."),
    click.option(
        "--decode-load", is_flag=True, help="Also measure how much pulls slow a load that reads memory."
    ),
    option("--json file", FILE, None, "Write all results to this file."),
)
def kv(
    model: str,
    device: str,
    dtype: str,
    page_size: int,
    lengths: tuple[int, ...],
    same_gpu: bool,
    ranks: RankCounts,
    file: Path | None,
    **settings: Any,
) -> None:
    """Measure how fast a prompt's KV pages come from another process.

    Starts a process that owns a pool of the model's pages, and pulls prompts of several lengths from it. The
    pages are those that used pools would allocate. Transports: shm and grpc on a CPU, cuda_ipc and grpc on
    GPUs. On GPUs random pages are pulled too, by the copy engine and by a kernel. No weights are loaded.

    \b
    Examples:
      baton bench kv
      baton bench kv --model Qwen/Qwen3-8B --decode-load --json kv.json
      CUDA_VISIBLE_DEVICES=0,1 baton bench kv --tokens 128,32768
      baton bench kv --ranks 1:2
    """
    where, owner_gpu = _devices(device, same_gpu, ranks)
    console = Console()
    try:
        layout = layout_of(model, dtype, page_size, where)
    except (CheckpointError, ModelError) as error:
        fail(str(error), code=2)
    usable = fitting(lengths, layout, where)
    if usable != lengths:
        left_out = ", ".join(str(length) for length in lengths if length not in usable)
        console.print(f"Left out for lack of memory: {left_out} tokens.", highlight=False)
    if not usable:
        fail("no prompt length fits into the free memory; give shorter ones with --tokens", code=2)
    bench = KvBench(model, layout, where, owner_gpu, usable, ranks=ranks, **settings)
    run_command(lambda: _kv(bench, Report(file, ""), console))
