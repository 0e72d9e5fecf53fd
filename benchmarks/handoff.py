"""How long a hand-off takes, and where: from the last prompt chunk to the first decode step with the request.

    python benchmarks/handoff.py --json handoff.json
    python benchmarks/handoff.py --sizes 1:1 1:2 2:1 2:2 --prompts 2048 16384      two GPUs or more
    python benchmarks/handoff.py --draft off suffix head --prompts 2048

Prefill and decode nodes, random weights in the shape of Qwen3-8B, requests one at a time through the gateway
of a pair. The nodes are those of `baton serve` with time stamps in them (benchmarks/stamps.py). Prints for
each pair of sizes and prompt length medians of milliseconds since the prefill node read the last chunk's
results. A prefill node takes the first GPUs, a decode node the last ones in opposite order, so that pages
cross between GPUs where there are too few for all ranks, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from draft_speed import write_head
from rich.console import Console
from rich.table import Table
from shared import make_parser, save_results
from stamps import DRAFTS, EVENTS
from timed import Ask, ask

from baton.bench.machine import visible_gpus
from baton.client import AsyncClient
from baton.rpc.errors import BatonError

sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("tools", "tests", "tests/cluster")]

from deployment import Deployment
from make_shape import SHAPES, write_shape
from process import Process

OUTPUT_TOKENS = 4
DRAFT_TOKENS = 3
"""However few are right."""
WARMUP = 2
"""Requests of each length before those that count."""
PAUSE_SECONDS = 0.1
"""Between two requests: the steps and stamps of one have ended."""

Stamp = tuple[float, str]
"""Seconds, and what happened."""


Times = dict[str, float]
"""Event of `stamps.EVENTS` -> milliseconds since the prefill node read the last chunk's results; DRAFTS,
where the first decode step carried some: when it was planned."""


def times_of(stamps: Iterable[Stamp]) -> Times:
    """Of one request. Raises ValueError where it was not handed off."""
    at: dict[str, float] = {}
    for seconds, what in sorted(stamps):
        if what not in ("launching", "launched", DRAFTS) or what not in at:
            at[what] = seconds  # pulls: the last; decode steps: the first
    missing = [what for what in EVENTS if what not in at]
    if missing:
        raise ValueError(f"a request was not handed off: no stamp says {', '.join(missing)}")
    drafts = [DRAFTS] if at.get(DRAFTS) == at["launching"] else []
    return {what: 1e3 * (at[what] - at["read"]) for what in (*EVENTS, *drafts)}


def take_stamps(folder: Path) -> list[Stamp]:
    """Those since the last call; no process is writing any."""
    lines: list[str] = []
    for file in folder.iterdir():
        lines += file.read_text().splitlines()
        os.truncate(file, 0)
    return [(float(at), what) for what, at in map(str.split, lines)]


Sizes = tuple[int, int]
"""Ranks of the prefill node, of the decode node."""
Found = dict[tuple[str, Sizes, int], tuple[float, list[Times]]]
"""By --draft, sizes and prompt length: bytes pulled a token of the prompt, and each request's times."""


class Pairs:
    """Workers of each size, and a gateway for each pair of sizes."""

    def __init__(self, args: argparse.Namespace, folder: Path, draft: str) -> None:
        write_shape(args.shape, folder / "model")
        if draft == "head":
            draft = str(folder / "head")
            write_head(folder / "model", folder / "head")
        self._draft = draft
        self.deployment = Deployment(folder, folder / "model")
        self._stamps = folder / "stamps"
        self._stamps.mkdir()
        self._args = args
        prefill = {tp: self._worker("prefill", tp) for tp in sorted({sizes[0] for sizes in args.sizes})}
        decode = {tp: self._worker("decode", tp) for tp in sorted({sizes[1] for sizes in args.sizes})}
        self.gateways = {
            sizes: self.deployment.add_gateway([decode[sizes[1]]], [prefill[sizes[0]]])
            for sizes in args.sizes
        }

    def _worker(self, role: str, tp: int) -> Process:
        args = self._args
        flags = ["--device", args.device, "--load-format", "dummy", "--kv-tokens", str(args.kv_tokens)]
        budget = ["--token-budget", str(args.budget)] if role == "prefill" else []
        draft = ["--draft", self._draft]
        if role == "decode" and self._draft != "off":
            draft += ["--draft-tokens", str(DRAFT_TOKENS)]
        worker = self.deployment.add_worker(role, *flags, *budget, *draft, "--tp", str(tp))
        worker.program = (sys.executable, str(Path(__file__).with_name("stamps.py")))
        worker.environment["HANDOFF_STAMPS"] = str(self._stamps)
        if args.device == "cuda":
            gpus = visible_gpus() if role == "prefill" else visible_gpus()[::-1]
            worker.environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:tp])
        return worker

    async def measure(self, sizes: Sizes, length: int) -> tuple[float, list[Times]]:
        """Raises ValueError where a request was not handed off, BatonError."""
        each: list[Times] = []
        size = 0.0
        async with AsyncClient(self.gateways[sizes].address) as client:
            for number in range(WARMUP + self._args.requests):
                what = Ask(length, OUTPUT_TOKENS, seed=f"{sizes} {length} {number}")
                answer = await ask(client, what, time.monotonic(), hand_off=True)
                await asyncio.sleep(PAUSE_SECONDS)
                stamps = take_stamps(self._stamps)
                if number >= WARMUP:  # in the first the decode node may still have to connect
                    each.append(times_of(stamps))
                    size = answer.pulled_bytes / length
        return size, each


async def measure(args: argparse.Namespace, draft: str, pairs: Pairs) -> Found:
    return {
        (draft, sizes, length): await pairs.measure(sizes, length)
        for sizes in args.sizes
        for length in args.prompts
    }


def table_of(found: Found) -> Table:
    table = Table(title="milliseconds since the last chunk's results were read, medians")
    ends = ("launched, least to most", "bytes a token", "with drafts")
    for heading in ("draft", "ranks", "prompt", *EVENTS[1:], *ends):
        table.add_column(heading, justify="right")
    for (draft, (prefill, decode), length), (size, each) in found.items():
        medians = [statistics.median(one[what] for one in each) for what in EVENTS[1:]]
        launched = [one["launched"] for one in each]
        extremes = f"{min(launched):.2f} to {max(launched):.2f}"
        row = draft, f"{prefill} to {decode}", f"{length:,}"
        drafts = f"{sum(DRAFTS in one for one in each)} of {len(each)}"
        table.add_row(*row, *(f"{value:.2f}" for value in medians), extremes, f"{size:,.0f}", drafts)
    return table


def sizes(text: str) -> Sizes:
    prefill, _, decode = text.partition(":")
    return int(prefill), int(decode)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="of the model")
    parser.add_argument("--device", default="cuda", help="of all workers: cuda, or cpu")
    parser.add_argument(
        "--sizes", type=sizes, nargs="+", default=[(1, 1)], help="PREFILL:DECODE, ranks of each"
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024, 2048], help="tokens")
    parser.add_argument("--requests", type=int, default=12, help="of each length")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a prefill node's step")
    parser.add_argument("--kv-tokens", type=int, default=65536, help="of a worker's pool")
    parser.add_argument(
        "--draft", nargs="+", default=["off"], help="as of `baton serve`, or head: of random weights"
    )
    args = parser.parse_args()
    found: Found = {}
    for draft in args.draft:
        with tempfile.TemporaryDirectory() as folder:
            pairs = Pairs(args, Path(folder), draft)
            try:
                with pairs.deployment:
                    found |= asyncio.run(measure(args, draft, pairs))
            except (BatonError, AssertionError, ValueError) as error:
                parser.exit(1, f"error: {error}\n")
    Console(width=170).print(table_of(found))
    settings = {"shape": args.shape, "device": args.device, "budget": args.budget}
    results = [
        {
            "draft": draft,
            "ranks": f"{ranks[0]} to {ranks[1]}",
            "prompt": length,
            "bytes_a_token": size,
            "milliseconds": each,
        }
        for (draft, ranks, length), (size, each) in found.items()
    ]
    save_results(args, {**settings, "results": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
