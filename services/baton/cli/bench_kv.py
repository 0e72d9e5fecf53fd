"""`baton bench kv`: how fast KV pages travel between two processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton import __version__
from baton.bench.machine import visible_gpus
from baton.bench.transfer import (
    Load,
    Rate,
    Slowdown,
    measure,
    measure_slowdown,
    methods_for,
    open_method,
    owner,
)
from baton.checkpoint import CheckpointError, resolve
from baton.cli.console import run_command
from baton.cli.options import F, SectionedCommand, fail
from baton.kvcache.pool import KvLayout, default_page_size
from baton.models.config import ModelError, read_config
from baton.rpc.address import new_incarnation
from baton.transport import SegmentError, TransportError
from baton.transport.registry import DEFAULT_KINDS
from baton.worker.engine import DTYPES
from baton.worker.published import make_pool

LENGTHS = "128,512,2048,8192,32768"
LOAD_TOKENS = 2048
"""Length of the pulls that run beside the decode-like load."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvBench:
    """What is measured."""

    model: str
    layout: KvLayout
    device: torch.device
    owner_gpu: str
    """As CUDA_VISIBLE_DEVICES names it; empty: on the CPU."""
    lengths: tuple[int, ...]
    repeats: int
    quotas: tuple[int, ...]
    decode_load: bool

    @property
    def pages(self) -> int:
        """Of each pool: the longest prompt fits twice, and once while others hold a half."""
        return 2 * -(-max(self.lengths) // self.layout.page_size) + 1


def layout_of(model: str, dtype: str, page_size: int, device: torch.device) -> KvLayout:
    """Raises ModelError or CheckpointError."""
    config = read_config(resolve(model))
    # As a worker would choose.
    default = torch.float32 if device.type == "cpu" else config.dtype
    return KvLayout(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        page_size or default_page_size(device),
        DTYPES.get(dtype, default),
    )


def fitting(lengths: Sequence[int], layout: KvLayout, device: torch.device) -> tuple[int, ...]:
    """The lengths for which two pools fit into the memory that is free."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else shutil.disk_usage("/dev/shm").free
    token = layout.page_bytes / layout.page_size
    return tuple(length for length in lengths if 3 * length * token < free)


async def run_bench(bench: KvBench, console: Console) -> tuple[list[Rate], list[Slowdown]]:
    """Raises TransportError, SegmentError or ChildError."""
    size = bench.layout.page_size
    _, published = make_pool(bench.layout, bench.pages, bench.device, DEFAULT_KINDS, new_incarnation())
    pages = published.pages
    methods = methods_for(bench.device, bench.quotas)
    load = Load(bench.device) if bench.decode_load else None
    rates: list[Rate] = []
    slowdowns: list[Slowdown] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.closing(published), Progress(*columns, console=console) as progress:
        steps = len(bench.lengths) * (bench.repeats + 1) + bench.decode_load
        bar = progress.add_task("starting the owner", total=len(methods) * steps)
        advance = functools.partial(progress.advance, bar)
        async with owner(bench.layout, bench.pages, bench.device.type, bench.owner_gpu) as endpoints:
            for method in methods:
                progress.update(bar, description=method.name)
                receiver = await open_method(method, endpoints, pages)
                try:
                    for length in bench.lengths:
                        rates.append(
                            await measure(method, receiver, pages, length, size, bench.repeats, advance)
                        )
                    if load is not None:
                        tokens = min(LOAD_TOKENS, max(bench.lengths))
                        slowdowns.append(await measure_slowdown(method, receiver, pages, tokens, size, load))
                        advance()
                finally:
                    await receiver.close()
    return rates, slowdowns


def figures_of(bench: KvBench, rates: list[Rate], slowdowns: list[Slowdown]) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    layout = bench.layout
    gpu = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else ""
    return {
        "baton": __version__,
        "machine": f"{platform.machine()} {platform.system()}",
        "torch": torch.__version__,
        "gpu": gpu,
        "two_gpus": bool(bench.owner_gpu) and bench.owner_gpu != visible_gpus()[0],
        "model": bench.model,
        "page_size": layout.page_size,
        "page_bytes": layout.page_bytes,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "repeats": bench.repeats,
        "rates": [
            {**dataclasses.asdict(rate), "gigabytes_per_second": rate.gigabytes_per_second} for rate in rates
        ],
        "decode_load": [{**dataclasses.asdict(one), "factor": one.factor} for one in slowdowns],
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """A row for each length and method; adjacent pages, as good as one copy, show what the link gives."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tokens", "MB", "how", "ms", "GB/s", "of adjacent"):
        table.add_column(column, justify="left" if column == "how" else "right", no_wrap=True)
    rates = figures["rates"]
    reference = rates[0]["method"]
    for tokens in sorted({rate["tokens"] for rate in rates}):
        of_length = [rate for rate in rates if rate["tokens"] == tokens]
        link = next(rate["gigabytes_per_second"] for rate in of_length if rate["method"] == reference)
        for number, rate in enumerate(of_length):
            speed = rate["gigabytes_per_second"]
            head = (f"{tokens:,}", f"{rate['bytes'] / 1e6:.1f}") if number == 0 else ("", "")
            row = (rate["method"], f"{rate['seconds'] * 1e3:.2f}", f"{speed:.1f}", f"{speed / link:.0%}")
            table.add_row(*head, *row)
    console.print(table)
    for one in figures["decode_load"]:
        text = f"decode-like load beside pulls ({one['method']}): {one['factor']:.2f} times slower"
        console.print(text, highlight=False)


async def _kv(bench: KvBench, file: Path | None, console: Console) -> int:
    try:
        figures = figures_of(bench, *await run_bench(bench, console))
    except (SegmentError, TransportError) as error:
        fail(str(error))
    show(figures, console)
    save(figures, file)
    return 0


def save(figures: dict[str, Any], file: Path | None) -> None:
    """As JSON, if a file is named."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.UsageError(f"{flag} takes numbers above 0 with commas between them, not {text!r}")
    return found


def _devices(name: str, same_gpu: bool) -> tuple[torch.device, str]:
    """The receiver's device, and the owner's GPU: another one if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu"), ""
    if not torch.cuda.is_available():
        fail(f"--device {name}: torch sees no CUDA device; use --device cpu", code=2)
    gpus = visible_gpus()
    return torch.device("cuda", 0), gpus[0] if same_gpu else gpus[-1 if len(gpus) < 2 else 1]


def _text(flag: str, default: str, text: str, metavar: str = "N,...") -> Callable[[F], F]:
    return click.option(flag, default=default, show_default=True, metavar=metavar, help=text)


def _number(flag: str, default: int, text: str, least: int = 1) -> Callable[[F], F]:
    kind = click.IntRange(least)
    return click.option(flag, type=kind, default=default, show_default=True, metavar="N", help=text)


@click.command(cls=SectionedCommand)
@click.option(
    "--model", default="demo", show_default=True, metavar="TEXT", help="Whose pages: a path or an id."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where both pools lie.",
)
@click.option(
    "--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True, help="Of the pages."
)
@_number("--page-size", 0, "Tokens per page; 0: as a worker's.", least=0)
@_text("--tokens", LENGTHS, "Lengths of prompts to pull.")
@_number("--repeats", 7, "Pulls of each length; the median counts.")
@_text("--quotas", "8,32", "Numbers of blocks for the copying kernel (GPU).")
@click.option("--same-gpu", is_flag=True, help="Both pools on one GPU, also where there are two.")
@click.option(
    "--decode-load", is_flag=True, help="Also how much pulls slow down what reads memory meanwhile."
)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write all figures there.",
)
def kv(
    model: str, device: str, dtype: str, page_size: int, tokens: str, repeats: int, quotas: str,
    same_gpu: bool, decode_load: bool, file: Path | None,
) -> None:  # fmt: skip
    """Measure how fast a prompt's KV pages come from another process.

    Starts a process that owns a pool of the model's pages, and pulls prompts of several lengths from it, page
    by page, where pools that have been in use would put it: on a CPU over shm and grpc, on GPUs over cuda_ipc
    and grpc; on GPUs at random places too (by the copy engine, by a kernel on so many blocks). No weights are
    loaded.

    \b
    Examples:
      baton bench kv
      baton bench kv --model Qwen/Qwen3-8B --decode-load --json kv.json
      CUDA_VISIBLE_DEVICES=0,1 baton bench kv --tokens 128,32768
    """
    lengths, kernel_quotas = _numbers(tokens, "--tokens"), _numbers(quotas, "--quotas")
    where, owner_gpu = _devices(device, same_gpu)
    console = Console()
    try:
        layout = layout_of(model, dtype, page_size, where)
    except (CheckpointError, ModelError) as error:
        fail(str(error), code=2)
    usable = fitting(lengths, layout, where)
    if usable != lengths:
        left_out = ", ".join(str(length) for length in lengths if length not in usable)
        console.print(f"Left out, for want of memory: {left_out} tokens.", highlight=False)
    if not usable:
        fail("no prompt length fits into the free memory; name shorter ones with --tokens", code=2)
    bench = KvBench(model, layout, where, owner_gpu, usable, repeats, kernel_quotas, decode_load)
    run_command(lambda: _kv(bench, file, console))
