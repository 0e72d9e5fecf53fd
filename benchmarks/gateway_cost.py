"""The cost of a token in the gateway: real processes and connections, and a decode node that computes
nothing.

    python benchmarks/gateway_cost.py --json benchmarks/results/gateway_cost.json

A tokenizer, gateways, a decode node that only sends tokens (`gateway_load/source.py`) and a process with
clients in a closed loop run on this machine; all text is detokenized. Each run reports tokens/s as counted
by the clients, and the CPU time of each process per 1,000 tokens. The aims: 10,000 tokens/s through one
gateway at one token a message, and 50,000 with tokens that accumulate. All processes share this machine's
cores. With few cores all but the gateways stay off the first one; tokens/s then depend on the other
processes as well, and the gateway's CPU time shows what it could do with a core of its own. The exit code is
1 if tokens/s miss an aim.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from rich.console import Console
from rich.table import Table
from shared import make_parser, save_results

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from process import Process

from baton.cli.console import table
from baton.cli.deployment import free_ports
from baton.v1 import tokenizer_pb2, tokenizer_pb2_grpc

HERE = Path(__file__).parent
ENOUGH_CORES = 6
"""With this many cores each process has one."""
ONE_BY_ONE = 1.02
"""Largest mean of tokens per message that counts as one token a message."""


@dataclass(frozen=True)
class Case:
    name: str
    api: str
    streams: int
    offered: int
    """Tokens/s that the decode node sends."""
    message_seconds: float = 0.005
    """Least time between two of its messages (--message-seconds of a real one)."""
    gateways: int = 1
    one_by_one: bool = False
    aim: int = 0
    """Tokens/s; 0: none."""


CASES = (
    *(Case("one by one", "grpc", 64, rate, one_by_one=True, aim=10_000) for rate in (10_500, 12_000, 14_000)),
    *(Case("accumulating", "grpc", 256, 64_000, seconds, aim=50_000) for seconds in (0.005, 0.04)),
    Case("accumulating", "grpc", 256, 64_000, gateways=2),
    Case("one by one", "http", 64, 8_000, one_by_one=True),
    Case("accumulating", "http", 256, 64_000, 0.04),
)


@dataclass
class Result:
    case: Case
    tokens_per_second: float
    tokens_per_message: float
    cpu_seconds_per_1000: dict[str, float]
    """Of each process, for 1,000 tokens."""

    @property
    def by_cpu(self) -> float:
        """Tokens/s of gateways with a core each."""
        return 1000 * self.case.gateways / self.cpu_seconds_per_1000["gateway"]

    @property
    def counts(self) -> bool:
        return not self.case.one_by_one or self.tokens_per_message <= ONE_BY_ONE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second_with_cores": round(self.by_cpu)}


@contextmanager
def program(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this benchmark, killed after the block."""
    command = [sys.executable, "-m", f"gateway_load.{module}", *arguments]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_line(process: subprocess.Popen[str], word: str) -> str:
    """The rest of its next line, which must begin with `word`."""
    assert process.stdout is not None
    first, _, rest = process.stdout.readline().strip().partition(" ")
    if first != word:
        raise SystemExit(f"{process.args!r} printed {first!r} {rest} instead of {word!r}")
    return rest


def character(tokenizer: Process) -> int:
    """A token whose text is one character."""
    with grpc.insecure_channel(tokenizer.address) as channel:
        request = tokenizer_pb2.EncodeRequest(
            inputs=[tokenizer_pb2.EncodeInput(text="a", add_special_tokens=False)]
        )
        (found,) = tokenizer_pb2_grpc.TokenizerStub(channel).Encode(request, timeout=10).results[0].token_ids
    return int(found)


def run(case: Case, tokenizer: Process, folder: Path, seconds: float) -> Result:
    vocabulary = str(tokenizer.info().model.vocab_size)
    token = str(character(tokenizer))
    step = (
        "--step-seconds",
        str(case.streams / case.offered),
        "--message-seconds",
        str(case.message_seconds),
    )
    with ExitStack() as ending:
        source = ending.enter_context(program("source", *step, "--vocabulary", vocabulary, "--token", token))
        flags = [
            "--tokenizer",
            tokenizer.address,
            "--decode",
            read_line(source, "ready"),
            "--log-level",
            "warning",
        ]
        shared = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
        if case.gateways > 1:
            flags += ["--shared", shared]
        gateways = [Process("gateway", f"gateway-{n}", flags, folder) for n in range(case.gateways)]
        for gateway in gateways:
            gateway.start()
            ending.callback(gateway.kill)
        for gateway in gateways:
            gateway.wait_ready()
        target = gateways[0].address if case.api == "grpc" else gateways[0].http
        load = ("--streams", str(case.streams), "--seconds", str(seconds))
        clients = ending.enter_context(
            program("clients", case.api, shared if case.gateways > 1 else target, *load)
        )
        watched = {
            "gateway": [gateway.pid for gateway in gateways],
            "tokenizer": [tokenizer.pid],
            "source": [source.pid],
            "clients": [clients.pid],
        }
        free_first_core([tokenizer.pid, source.pid, clients.pid])
        read_line(clients, "begin")
        before = {name: cpu_seconds(pids) for name, pids in watched.items()}
        counts = json.loads(read_line(clients, "end"))
        used = {name: cpu_seconds(pids) - before[name] for name, pids in watched.items()}
    tokens = max(1, counts["tokens"])
    return Result(
        case,
        tokens_per_second=round(counts["tokens"] / counts["seconds"]),
        tokens_per_message=round(tokens / max(1, counts["messages"]), 3),
        cpu_seconds_per_1000={name: round(1000 * spent / tokens, 5) for name, spent in used.items()},
    )


def free_first_core(pids: Sequence[int]) -> None:
    """With few cores, keeps these processes off the first one, which is left to the gateways."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ENOUGH_CORES:
        for pid in pids:
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, cores[1:] or cores)


def cpu_seconds(pids: Sequence[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def verdicts(results: Sequence[Result]) -> dict[str, bool]:
    """Aim -> whether one of its runs reached it."""
    found: dict[str, bool] = {}
    for result in results:
        case = result.case
        if case.aim:
            aim = f"{case.name}, {case.api}: at least {case.aim:,} tokens/s"
            reached = result.counts and result.tokens_per_second >= case.aim
            found[aim] = found.get(aim, False) or reached
    return found


def result_table(results: Sequence[Result]) -> Table:
    names = ("tokens", "API", "gateways", "streams", "offered/s", "ms", "tokens/s", "a message")
    shares = ("CPU ms per 1,000: gateway", "tokenizer", "source", "clients", "tokens/s with cores")
    rows = table(*names, *shares)
    for result in results:
        case = result.case
        spent = [f"{1000 * seconds:.1f}" for seconds in result.cpu_seconds_per_1000.values()]
        counts = (case.gateways, case.streams, case.offered, round(1000 * case.message_seconds))
        counts = (*counts, round(result.tokens_per_second))
        row = [case.name, case.api, *map(str, counts), f"{result.tokens_per_message:.2f}", *spent]
        rows.add_row(*row, str(round(result.by_cpu)))
    return rows


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the runs, from 0")
    args = parser.parse_args()
    cases = [case for number, case in enumerate(CASES) if args.only is None or number in args.only]
    console = Console(width=170)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = Process("tokenizer", "tokenizer", ["--model", "demo"], folder)
        tokenizer.start()
        try:
            tokenizer.wait_ready()
            for case in cases:
                results.append(run(case, tokenizer, folder, args.seconds))
                console.print(result_table(results[-1:]))
        finally:
            tokenizer.kill()
    found = verdicts(results)
    console.print(result_table(results))
    for aim, reached in found.items():
        console.print(f"{'reached' if reached else 'MISSED'}: {aim}")
    runs = [result.as_dict() for result in results]
    record = {"seconds": args.seconds, "aims": found, "load_average": os.getloadavg(), "runs": runs}
    save_results(args, record)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
