"""Simulates one layout of nodes under one traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.gateway.request import GatewayRequest
from baton.rpc.errors import from_status
from baton.sim.world import Actor, World
from baton.sizing.gateway import SizingGateway
from baton.sizing.nodes import NodeSetup, SizingDecode, SizingPrefill
from baton.sizing.traffic import Traffic
from baton.slo import RequestTimes, Targets
from baton.v1 import common_pb2, inference_pb2

SimulationProgress = Callable[[int], None]
"""Called with the number of ended requests."""
PROGRESS_EVERY = 32
"""Ended requests."""


@dataclass(frozen=True, slots=True, order=True)
class NodeLayout:
    prefill: int
    """Prefill nodes; 0: decode nodes compute prompts themselves."""
    decode: int
    split: str = "auto"
    """Which prompts are handed off: `--split` of the gateway."""

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        if not self.prefill:
            return f"{self.decode} aggregated"
        mode = f", {self.split}" if self.split != "auto" else ""
        return f"{self.prefill} + {self.decode}{mode}"


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Use of all prefill nodes, or of all decode nodes."""

    busy: float
    """Part of the time that the devices computed while requests arrived; mean of the nodes."""
    most_pages: int
    """Most pages that requests of one node held at a time."""
    pages: int
    """Pages of a node's pool."""


@dataclass(frozen=True, slots=True)
class Simulated:
    layout: NodeLayout
    records: list[RequestTimes]
    """Records of the counted requests, in the order of their arrival, as a client of `baton bench`
    records them."""
    seconds: float
    """Time in which these arrived."""
    prefill: NodeUsage | None
    decode: NodeUsage
    retractions: int

    def met(self, targets: Targets) -> int:
        """How many requests met the targets."""
        return sum(map(targets.met, self.records))


class Simulation:
    """For one call of `run`."""

    def __init__(
        self, layout: NodeLayout, setup: NodeSetup, traffic: Traffic, progress: SimulationProgress
    ) -> None:
        self._world = World(0)
        self._actor = Actor("clients")
        self._setup = setup
        self._traffic = traffic
        self._progress = progress
        self._layout = layout
        self._prefill = {
            name: SizingPrefill(self._world, name, setup)
            for name in (f"prefill-{i}" for i in range(layout.prefill))
        }
        self._decode = {
            name: SizingDecode(self._world, name, setup, self._prefill)
            for name in (f"decode-{i}" for i in range(layout.decode))
        }
        self._records = [RequestTimes(arrival.at, arrival.at) for arrival in traffic.arrivals]
        self._gateway = SizingGateway(self._world, setup, layout.split, self._prefill, self._decode)
        self._left = traffic.last - traffic.first
        self._ended = 0
        self._busy: dict[str, float] = {}
        """Seconds that each node's device computed while requests arrived."""

    def run(self) -> Simulated:
        world, traffic = self._world, self._traffic
        for number, arrival in enumerate(traffic.arrivals):
            delay = arrival.at + self._setup.profile.host.request
            world.at(delay, self._actor, self._arrive(number))
        world.at(traffic.end, self._actor, self._record_busy)
        while self._left and world.step():
            pass
        records = self._records[traffic.first : traffic.last]
        start = records[0].at if traffic.first else 0.0
        retractions = sum(node.core.scheduler.retractions for node in self._decode.values())
        prefill = self._usage(list(self._prefill.values())) if self._prefill else None
        decode = self._usage(list(self._decode.values()))
        return Simulated(self._layout, records, traffic.end - start, prefill, decode, retractions)

    def _record_busy(self) -> None:
        """The last counted request has arrived."""
        nodes: list[SizingPrefill | SizingDecode] = [*self._prefill.values(), *self._decode.values()]
        self._busy = {node.name: node.runner.busy for node in nodes}

    def _usage(self, nodes: list[SizingPrefill] | list[SizingDecode]) -> NodeUsage:
        busy = sum(self._busy[node.name] for node in nodes) / len(nodes) / max(self._traffic.end, 1e-9)
        return NodeUsage(min(1.0, busy), max(node.most_pages for node in nodes), nodes[0].pages)

    def _arrive(self, number: int) -> Callable[[], None]:
        return lambda: self._start(number)

    def _start(self, number: int) -> None:
        arrival = self._traffic.arrivals[number]
        common = min(self._traffic.shared_prefix, arrival.prompt)
        # Two requests share the prefix and nothing beyond it.
        prompt = (0,) * common + (number + 1,) * (arrival.prompt - common)
        start = inference_pb2.GenerateStart(sampling=common_pb2.SamplingParams(ignore_eos=True))
        start.sampling.max_tokens = arrival.output
        start.tokens.token_ids.extend(prompt)
        request: GatewayRequest | None = None

        def read() -> None:
            if request is not None:
                self._read(number, request)

        request = self._gateway.ask(start, read)
        read()  # it may have been refused

    def _read(self, number: int, request: GatewayRequest) -> None:
        record, now = self._records[number], self._world.now
        for event in request.take():
            kind = event.WhichOneof("kind")
            if kind == "delta":
                record.arrivals.append((now, len(event.delta.token_ids)))
            elif kind != "accepted":
                self._end(number, event)

    def _end(self, number: int, event: inference_pb2.GenerateResponse) -> None:
        record = self._records[number]
        record.end = self._world.now
        if event.HasField("failed"):
            error = from_status(event.failed)
            record.error, record.message = error.reason, error.message
        else:
            stats = event.finished.stats
            record.prompt_tokens, record.cached_tokens = stats.prompt_tokens, stats.cached_tokens
            record.output_tokens, record.pulled_pages = stats.output_tokens, stats.pulled_pages
            record.retractions, record.transport = stats.retractions, stats.transport
        self._left -= self._traffic.first <= number < self._traffic.last
        self._ended += 1
        if self._ended % PROGRESS_EVERY == 0:
            self._progress(self._ended)


def simulate(
    layout: NodeLayout, setup: NodeSetup, traffic: Traffic, progress: SimulationProgress = lambda ended: None
) -> Simulated:
    """Deterministic."""
    return Simulation(layout, setup, traffic, progress).run()
