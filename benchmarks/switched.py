"""Runs `baton serve ROLE ...`; a gateway or decode node switches its recorder off and on in short blocks.

    python switched.py FOLDER BLOCK_SECONDS REPEAT ROLE FLAGS...

Blocks come in pairs, one of each kind, in random order. When the process ends it writes FOLDER/ROLE.json, a
list of pairs: when it began, on the monotonic clock; used processor seconds and work done with the recorder
on; the same with it off. Seconds are the process's and, of a decode node, the step thread's. Work is the
number of steps (a decode node's alone), of output tokens, of requests begun, and of requests ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from baton.api.server import GatewayNode
from baton.cli.main import main as baton
from baton.tracing.recorder import CAPACITY, EventKind, Recorder
from baton.worker.decode.server import DecodeNode


def fill(recorder: Recorder) -> None:
    """With events of no request, so that from the first one on each new event drops an old one."""
    for number in range(CAPACITY):
        recorder.add(EventKind.SENT, 2**63 + 1, number // 20, 0, 0, 1000 + number, 10**9 + number, number)


def repeat(recorder: Recorder, times: int) -> None:
    """Each event is recorded so often."""
    add = recorder.add

    def several(*values: Any, **named: Any) -> None:
        for _ in range(times):
            add(*values, **named)

    if times != 1:
        recorder.add = several  # type: ignore[method-assign]


async def switch(
    recorder: Recorder, seconds: float, clocks: list[int], work: Callable[[], list[int]], file: Path
) -> None:
    """Until it is cancelled. work: done so far."""
    draw = random.Random(file.name)
    pairs: list[Any] = []
    try:
        while True:
            began, pair = time.monotonic(), {}
            for recording in draw.sample((True, False), 2):
                recorder._silent = not recording
                before = [time.clock_gettime(clock) for clock in clocks], work()
                await asyncio.sleep(seconds)
                after = [time.clock_gettime(clock) for clock in clocks], work()
                pair[recording] = [
                    [new - old for new, old in zip(*each, strict=True)]
                    for each in zip(after, before, strict=True)
                ]
            pairs.append((began, pair[True], pair[False]))
    finally:
        file.write_text(json.dumps(pairs))  # noqa: ASYNC240 (the process ends)


def switched(node_class: Any, folder: Path, seconds: float, times: int, clocks: Any, work: Any) -> None:
    """Nodes of this class are switched from their start on. clocks, work: of a node."""
    start, stop = node_class.start, node_class.stop

    async def start_switched(node: Any, address: str) -> None:
        await start(node, address)
        fill(node.recorder)
        repeat(node.recorder, times)
        file = folder / f"{node.role}.json"
        node.switching = asyncio.create_task(
            switch(node.recorder, seconds, clocks(node), partial(work, node), file)
        )

    async def stop_switched(node: Any) -> None:
        node.switching.cancel()
        await asyncio.wait([node.switching])
        await stop(node)

    node_class.start, node_class.stop = start_switched, stop_switched


def gateway_work(node: GatewayNode) -> list[int]:
    load = node.load()
    ended = load.finished + load.failed + load.cancelled
    return [int(node.gateway.metrics.output_tokens.value), load.requests + ended, ended]


def decode_work(node: DecodeNode) -> list[int]:
    core = node.core_or_none
    assert core is not None
    ended = core.counters.finished + core.counters.failed + core.counters.cancelled
    begun = len(core.unfinished) + ended
    return [core.scheduler.step_number, core.counters.output_tokens, begun, ended]


def main() -> None:
    folder, block, times = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    process = time.CLOCK_PROCESS_CPUTIME_ID
    switched(GatewayNode, folder, block, times, lambda node: [process], gateway_work)
    switched(
        DecodeNode,
        folder,
        block,
        times,
        lambda node: [process, time.pthread_getcpuclockid(node.steps._thread.ident)],
        decode_work,
    )
    sys.argv = ["baton", "serve", *sys.argv[4:]]
    baton()


if __name__ == "__main__":
    main()
