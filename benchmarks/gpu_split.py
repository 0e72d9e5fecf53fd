"""One prefill and one decode node on two GPUs, beside two nodes that do both, under the same loads.

    python benchmarks/gpu_split.py --out results --commit $(git rev-parse --short HEAD)

Random weights in the shape of Qwen3-8B, bf16, greedy; everything through gRPC from a client of its own. For
each layout: time to first token when idle, open-loop loads (Poisson arrivals, 25 s each), and the requests of
`baton bench offline`. Writes the JSON files of `baton bench` and the logs of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from baton.cli.deployment import Deployment, DeploymentPlan

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape

WORKER = {"load_format": "dummy", "dtype": "bfloat16", "max_rows": 256}


def plan_of(layout: str, model: str, args: argparse.Namespace, folder: Path) -> DeploymentPlan:
    """`split`: prompts in steps of up to --budget tokens; `aggregated`: mixed steps of up to --chunk."""
    split = layout == "split"
    worker = {**WORKER, "model": model, "device": args.device, "tp": args.tp, "ep": args.ep}
    worker |= {"quantization": args.quantization, "kv_dtype": args.kv_dtype}
    settings = {
        "tokenizer": {"model": model},
        "prefill": {**worker, "token_budget": args.budget},
        "decode": {**worker, "token_budget": args.budget if split else args.chunk},
        "gateway": {"split": args.split},
    }
    if args.message_seconds:
        settings["decode"]["message_seconds"] = args.message_seconds
    return DeploymentPlan(
        prefill=int(split),
        decode=1 if split else args.replicas,
        gateways=args.gateways,
        settings=settings,
        restart=False,
        log_folder=folder,
    )


def measurements(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> arguments of `baton bench`. Seeds differ, so that nothing is found cached."""
    found = {}
    for seed, length in enumerate(args.idle, start=100):
        found[f"idle-{length}"] = [
            *("serve", "--concurrency", "1", "--requests", str(args.requests), "--output-tokens", "16"),
            *("--prompt-tokens", str(length), "--seed", str(seed), "--warmup", "2"),
        ]
    for seed, (prompt, rate) in enumerate(args.loads, start=200):
        found[f"load-{prompt}-{rate:g}"] = [
            *("serve", "--rate", f"{rate:g}", "--seconds", str(args.seconds), "--prompt-tokens", str(prompt)),
            *("--output-tokens", str(args.output), "--seed", str(seed), "--clients", str(args.clients)),
            *("--ttft-target-ms", "200", "--itl-target-ms", f"{args.itl_target_ms:g}"),
        ]
    if args.offline:
        found["offline"] = [
            *("offline", "--clients", "4", "--seed", "0", "--requests", str(args.offline)),
            *("--repeats", str(args.repeats)),
        ]
    return found


async def measure(layout: str, model: str, args: argparse.Namespace, console: Console) -> None:
    folder = args.out / f"logs-{layout}"
    started = time.monotonic()
    async with Deployment(plan_of(layout, model, args, folder), console) as deployment:
        console.print(f"{layout}: up after {time.monotonic() - started:.1f} s")
        for name, arguments in measurements(args).items():
            if args.only and not any(name.startswith(prefix) for prefix in args.only):
                continue
            console.rule(f"{layout} {name}")
            file = args.out / f"{layout}-{name}.json"
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "baton.cli.main", "bench", *arguments),
                *("--server", deployment.address, "--json", str(file), "--commit", args.commit),
            )
            if await process.wait():
                console.print(f"{layout} {name}: failed")


def load(text: str) -> tuple[int, float]:
    prompt, _, rate = text.partition("@")
    return int(prompt), float(rate)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--commit", default="", help="noted in the figures")
    parser.add_argument("--layouts", nargs="+", default=["split", "aggregated"])
    parser.add_argument("--model", default="", help="a model directory; default: of --shape")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each worker, on a GPU each")
    parser.add_argument("--ep", action="store_true", help="whole experts on each rank")
    parser.add_argument("--quantization", default="auto", help="fp8, int8 or int4, while loading")
    parser.add_argument("--kv-dtype", default="auto", help="auto or fp8_e4m3")
    parser.add_argument("--chunk", type=int, default=1024, help="token budget of aggregated nodes")
    parser.add_argument("--replicas", type=int, default=2, help="aggregated nodes")
    parser.add_argument("--gateways", type=int, default=1, help="gateways that share a port")
    parser.add_argument("--clients", type=int, default=2, help="processes that offer a load")
    parser.add_argument("--split", default="always", help="where prompts of `split` are computed")
    parser.add_argument("--message-seconds", default="", help="of decode nodes; default: theirs")
    parser.add_argument("--budget", type=int, default=2048, help="token budget of a prefill node")
    parser.add_argument("--idle", type=int, nargs="*", default=[128, 2048, 8192, 32000])
    parser.add_argument("--requests", type=int, default=10, help="of each idle measurement")
    loads = [(1024, 8.0), (1024, 16.0), (1024, 24.0), (1024, 32.0)]
    parser.add_argument("--loads", type=load, nargs="*", default=loads, help="PROMPT@RATE")
    parser.add_argument("--output", type=int, default=256, help="output tokens of a load's request")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--itl-target-ms", type=float, default=15.0, help="for a load's goodput")
    parser.add_argument("--offline", type=int, default=256, help="requests; 0: leave it out")
    parser.add_argument("--repeats", type=int, default=1, help="of those; the median counts")
    parser.add_argument("--only", nargs="*", help="measurements whose names begin so")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_shape(args.shape, Path(folder))
            args.model = folder
        for layout in args.layouts:
            asyncio.run(measure(layout, args.model, args, console))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
