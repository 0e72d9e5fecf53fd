"""What a worker of several ranks costs on a CPU: a plan's way to a follower, rank 0's time for it, a step.

    python benchmarks/ranks.py [--rows 256] [--plans 2000] [--out FILE]

The way of a plan is measured between two processes that compute nothing: from before it is encoded until the
other process has decoded it, by the monotonic clock that both share. Steps are those of a decoder of 8 layers
of 512 values with random weights: one rank with two threads, and two ranks with one thread each, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from baton.bench.machine import machine, versions
from baton.config import DecodeConfig
from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.worker.engine import Engine, build_engine
from baton.worker.ranks.channel import Channel, ChannelClosed
from baton.worker.ranks.plan_codec import PlanDecoder, PlanEncoder

WARM_UP = 100
PAGES = 64
"""Of each row, at first."""
STEPS = 60


def plan(number: int, rows: int, pages: list[tuple[int, ...]]) -> StepPlan:
    """As a scheduler makes it: each row is one token on, and each 16th one has a new page; tables that have
    not changed are the same objects."""
    start = 16 * PAGES + number
    for slot in range(number % 16, rows, 16):
        pages[slot] = (*pages[slot], number)
    return StepPlan(
        number, tuple(PlanRow(slot, None, start, (pages[slot],), (slot,)) for slot in range(rows))
    )


def way(rows: int, plans: int) -> dict[str, float]:
    """Microseconds."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _follow(Channel(theirs, 5.0))
        os._exit(0)
    theirs.close()
    channel, encoder = Channel(ours, 5.0), PlanEncoder()
    pages = [tuple(range(slot * PAGES, (slot + 1) * PAGES)) for slot in range(rows)]
    times, own = [], []
    for number in range(plans):
        step = plan(number, rows, pages)
        began = time.monotonic()
        channel.send_plan(encoder.encode(step), 1)
        own.append(time.monotonic() - began)
        (decoded,) = struct.unpack("d", channel.receive_bytes(5.0))
        times.append(decoded - began)
        time.sleep(2e-4)
    channel.close()
    os.waitpid(pid, 0)
    times, own = sorted(times[WARM_UP:]), sorted(own[WARM_UP:])
    return {
        "plan_to_decoded_us_p50": 1e6 * times[len(times) // 2],
        "plan_to_decoded_us_p99": 1e6 * times[len(times) * 99 // 100],
        "rank0_us_p50": 1e6 * own[len(own) // 2],
        "rank0_us_p99": 1e6 * own[len(own) * 99 // 100],
    }


def _follow(channel: Channel) -> None:
    decoder = PlanDecoder()
    try:
        while True:
            _, message = channel.next()
            decoder.decode(message)
            channel.send_bytes(struct.pack("d", time.monotonic()))
    except ChannelClosed:
        return


def checkpoint(folder: Path) -> Path:
    """Configuration alone: weights are random."""
    LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def engine(model: Path, tp: int, threads: int) -> Engine:
    config = DecodeConfig(model=str(model), load_format="dummy", tp=tp, threads=threads, kv_tokens=8192)
    return build_engine(config, 0xBE7C0 + tp)


def step_ms(made: Engine, threads: int, rows: int) -> float:
    torch.set_num_threads(threads)
    params = SamplingParams(temperature=0.0)
    inits = tuple(SlotInit(slot, params, 0, (), (), last_token=1) for slot in range(rows))
    batch = tuple(
        PlanRow(slot, None, 100, (tuple(range(slot * 8, slot * 8 + 8)),), (slot,)) for slot in range(rows)
    )
    began = time.perf_counter()
    made.runner.read(made.runner.launch(StepPlan(1, batch, inits)))
    return 1e3 * (time.perf_counter() - began)


def steps(rows: int) -> dict[str, float]:
    """Medians in milliseconds, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder))
        two, one = engine(model, 2, 1), engine(model, 1, 2)
        try:
            times: dict[str, list[float]] = {"two_ranks_ms": [], "one_rank_two_threads_ms": []}
            for turn in range(STEPS):
                ours, theirs = step_ms(two, 1, rows), step_ms(one, 2, rows)
                if turn >= 5:
                    times["two_ranks_ms"].append(ours)
                    times["one_rank_two_threads_ms"].append(theirs)
        finally:
            one.close()
            two.close()
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "plans": {}, "steps": {}}
    for rows in (1, 16, options.rows):
        found["plans"][rows] = way(rows, options.plans)
        print(
            rows, "rows:", {name: round(value, 1) for name, value in found["plans"][rows].items()}, flush=True
        )
    for rows in (1, 16):
        found["steps"][rows] = steps(rows)
        print(rows, "rows:", {name: round(value, 2) for name, value in found["steps"][rows].items()})
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
