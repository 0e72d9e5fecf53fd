"""Sends a small request through each hand-off in turn: prefill node, pull, decode node."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import grpc

from baton.gateway.decode_client import DecodeClient
from baton.gateway.split_decision import ALWAYS
from baton.rpc.errors import BatonError, deadline_exceeded, unavailable
from baton.v1 import common_pb2, decode_pb2

PROBE_SECONDS = 10.0
"""Longest time of a probe."""
PROMPT_TOKENS = 160
"""Enough for full pages of every usual size."""

NodePair = tuple[str, str]
"""Addresses of a decode node and of a prefill node; "" where there are no prefill nodes."""


@dataclass(slots=True, eq=False)
class _Sink:
    """The token sink of a running probe."""

    done: asyncio.Future[decode_pb2.RequestStats]
    attempt: int = 0
    attempts: None = None

    def on_admitted(self) -> None:
        pass

    def on_prompt(self, prompt: decode_pb2.PromptDone) -> None:
        pass

    def on_tokens(self, address: str, delta: decode_pb2.TokenDelta) -> None:
        pass

    def on_finished(self, stats: decode_pb2.RequestStats) -> None:
        if not self.done.done():
            self.done.set_result(stats)

    def on_failed(self, error: BatonError, lost: bool) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Prober:
    """`failures`: the error of each pair's last probe. Being too busy for a probe is no failure."""

    def __init__(
        self,
        hops: Callable[[], Sequence[tuple[DecodeClient, str]]],
        next_number: Callable[[], int],
        every: float,
        report: Callable[[str, float], None],
    ) -> None:
        """hops: the pairs to probe. next_number: returns a request number. every: seconds between probes.
        report: gets the outcome and the seconds of each."""
        self.failures: dict[NodePair, str] = {}
        self._hops = hops
        self._next_number = next_number
        self._every = every
        self._report = report
        self._turn = count()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="probe")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            pairs = self._hops()
            known = {(node.address, prefill) for node, prefill in pairs}
            self.failures = {pair: text for pair, text in self.failures.items() if pair in known}
            if pairs:
                await self._probe(*pairs[next(self._turn) % len(pairs)])

    async def _probe(self, node: DecodeClient, prefill: str) -> None:
        started, pair = time.monotonic(), (node.address, prefill)
        try:
            stats = await self._ask(node, prefill)
        except BatonError as error:
            busy = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            outcome, failure = ("refused", "") if busy else ("failed", error.message)
        else:
            handed_off = stats.prefill_address == prefill and (stats.pulled_pages > 0 or not prefill)
            own_choice = not stats.prefill_address and not stats.handoff_retries
            outcome, failure = "ok", ""
            if not handed_off and not own_choice:
                outcome, failure = "failed", "the hand-off failed; the prompt was computed elsewhere"
        if failure:
            self.failures[pair] = failure
        elif outcome == "ok":
            self.failures.pop(pair, None)
        self._report(outcome, time.monotonic() - started)

    async def _ask(self, node: DecodeClient, prefill: str) -> decode_pb2.RequestStats:
        """Generates two tokens for a prompt that no node has cached. Raises BatonError."""
        assert node.info is not None
        model, number = node.info.model, self._next_number()
        length = min(PROMPT_TOKENS, model.context_length - 2)
        start = decode_pb2.DecodeStart(
            request=number,
            token_ids=[random.randrange(model.vocab_size) for _ in range(length)],
            sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
            timeout_ms=int(1000 * PROBE_SECONDS),
            prefill=[prefill] if prefill else [],
            local_prefill_tokens=ALWAYS,
            namespace=f"baton-probe-{number}",
        )
        sink = _Sink(asyncio.get_running_loop().create_future())
        if not node.send(start, sink):
            raise unavailable(f"decode node {node.address} is lost: {node.trouble}", "DECODE_LOST")
        try:
            async with asyncio.timeout(PROBE_SECONDS + 1.0):
                return await sink.done
        except TimeoutError:
            raise deadline_exceeded(f"no answer within {PROBE_SECONDS:g} s") from None
        finally:
            node.cancel(number)
