"""What a gateway owns: its peers, its running requests, and what it tells about itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from itertools import count

from baton.config import GatewayConfig
from baton.discovery.finder import Finder
from baton.discovery.members import Change
from baton.gateway import admission
from baton.gateway.decode_node import DecodeNode
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.requests import Request
from baton.gateway.routing import Candidate, pick_decode
from baton.gateway.tokenizer import Tokenizer
from baton.rpc.errors import BatonError, exhausted, failed_precondition, unavailable
from baton.rpc.ids import new_incarnation
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks
from baton.v1 import inference_pb2, node_pb2

DECODE = "127.0.0.1:50071"
"""The decode node when neither any nor an etcd is configured."""

_log = get_logger("baton.gateway")


class Gateway:
    """Used on one event loop only."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.incarnation = new_incarnation()
        self.metrics = GatewayMetrics()
        self.tokenizer = Tokenizer(config.tokenizer)
        self._nodes: dict[str, DecodeNode] = {}
        self._leaving: set[DecodeNode] = set()
        self._decode = self._finder("decode", config.decode or (() if config.etcd else (DECODE,)))
        self._prefill = self._finder("prefill", config.prefill)
        self._numbers = count(1)
        self._running: set[Request] = set()
        self._tasks = Tasks()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._counts = dict.fromkeys(("finished", "failed", "cancelled", "prompt", "cached", "output"), 0)

    # Life.

    def start(self) -> None:
        """Begins to connect; what cannot be reached yet is tried again and again."""
        self.tokenizer.start()
        self._decode.start()
        self._prefill.start()

    async def wait_until_usable(self, seconds: float) -> bool:
        """Waits for the tokenizer and one decode node, so long at most; logs what it waits for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        next_word = loop.time() + 2.0
        while self.missing():
            now = loop.time()
            if now >= deadline:
                return False
            if now >= next_word:
                _log.info("waiting", peers="; ".join(self.missing()))
                next_word = now + 5.0
            await asyncio.sleep(0.02)
        return True

    def missing(self) -> list[str]:
        """Why no request can be served now; empty: requests are served."""
        missing = [] if self.tokenizer.connected else [f"tokenizer {self.tokenizer.address}"]
        if not any(node.usable for node in self._nodes.values()):
            missing += [f"decode {node.address}: {node.trouble}" for node in self._nodes.values()]
            missing += [f"decode nodes of {place}" for place in self._decode.searches if not self._nodes]
        return missing

    @property
    def healthy(self) -> bool:
        return not self._draining and not self.missing()

    async def drain(self, seconds: float) -> int:
        """Takes no more requests; returns how many still run when none does, or after so long."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._running)

    async def stop(self) -> None:
        """Fails what still runs and leaves all peers. Idempotent."""
        self._draining = True
        for request in list(self._running):
            request.fail(unavailable("the gateway is stopping", "STOPPING", 1000))
        await asyncio.gather(self._decode.close(), self._prefill.close())
        nodes = [*self._nodes.values(), *self._leaving]
        await asyncio.gather(*(node.close() for node in nodes), self.tokenizer.close(), self._tasks.close())

    # Nodes.

    def _finder(self, role: str, addresses: Sequence[str]) -> Finder:
        changed = {"decode": self._decode_changed, "prefill": lambda change: None}[role]
        return Finder(role, addresses, self.config.etcd, self.config.etcd_prefix, changed)

    def _decode_changed(self, change: Change) -> None:
        for address in change.left:
            self._tasks.spawn(self._leave(self._nodes.pop(address)), f"leave {address}")
        for address in change.joined:
            node = DecodeNode(address, self.incarnation, self._accept, self.tokenizer.flush)
            self._nodes[address] = node
            node.start()

    async def _leave(self, node: DecodeNode) -> None:
        """The node gets no more requests; it is left when those that it has are done."""
        self._leaving.add(node)
        # Each has a deadline of its own.
        while node.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await node.close()
        self._leaving.discard(node)

    @property
    def prefill_nodes(self) -> list[str]:
        """host:port of the prefill nodes that are known."""
        return self._prefill.addresses

    # Requests.

    def request(self, start: inference_pb2.GenerateStart, on_change: Callable[[], None]) -> Request:
        """A request, not begun yet."""
        return Request(self, start, on_change)

    def next_number(self) -> int:
        return next(self._numbers)

    def admit(self, request: Request, start: inference_pb2.GenerateStart) -> None:
        """Raises BatonError for a request that is wrong, or that cannot be taken now."""
        admission.check_start(start, self.config, self._model())
        if self._draining:
            raise unavailable("the gateway is draining", "DRAINING", 1000)
        if len(self._running) >= self.config.max_requests:
            raise exhausted(f"{len(self._running)} requests are running already", "TOO_MANY_REQUESTS", 1000)
        self._running.add(request)
        self._idle.clear()
        self.model()
        self.tokenizer.check()

    def forget(self, request: Request, outcome: str) -> None:
        """The request has ended."""
        self.metrics.requests.labels(outcome).inc()
        self._counts[outcome] += 1
        self._counts["prompt"] += len(request.log.prompt_ids)
        self._counts["cached"] += request.log.cached_tokens
        self._counts["output"] += request.log.output_tokens
        self._running.discard(request)
        if not self._running:
            self._idle.set()

    def pick_node(self, preferred: str, tried: Collection[str]) -> DecodeNode | None:
        candidates = [Candidate(node.address, node.requests) for node in self._nodes.values() if node.usable]
        address = pick_decode(candidates, preferred, tried)
        return self._nodes[address] if address is not None else None

    def no_decode_node(self) -> BatonError:
        nodes = "; ".join(
            f"{node.address}: {node.trouble}" for node in self._nodes.values() if not node.usable
        )
        return unavailable(f"no decode node can be reached ({nodes})", "NO_DECODE_NODE", 1000)

    # What is served.

    def model(self) -> node_pb2.ModelInfo:
        """The model, as clients see it. Raises BatonError while no decode node has been reached."""
        model = self._model()
        if model is None:
            raise self.no_decode_node()
        return model

    def _model(self) -> node_pb2.ModelInfo | None:
        models = [node.info.model for node in self._nodes.values() if node.usable and node.info is not None]
        if not models:
            return None
        model = node_pb2.ModelInfo()
        model.CopyFrom(models[0])
        model.name = self.config.served_name or model.name
        model.chat = self.tokenizer.chat
        model.context_length = min(each.context_length for each in models)
        return model

    def _accept(self, info: node_pb2.NodeInfo) -> None:
        """Refuses a decode node that is none, or that serves another model than the others."""
        if info.role != "decode" or not info.HasField("model"):
            raise failed_precondition(f"{info.address} is no decode node but {info.role or 'unknown'}")
        tokenizer = self.tokenizer.info
        if tokenizer is not None and tokenizer.model.vocab_size != info.model.vocab_size:
            raise failed_precondition(
                f"decode node {info.address} has a vocabulary of {info.model.vocab_size} tokens, the "
                f"tokenizer one of {tokenizer.model.vocab_size}: start all with the same model",
                "MODEL_MISMATCH",
            )
        model = self._model()
        if model is not None and model.fingerprint != info.model.fingerprint:
            raise failed_precondition(
                f"decode node {info.address} serves another model than the others: start all with the same",
                "MODEL_MISMATCH",
            )

    def info(self) -> node_pb2.NodeInfo:
        info = node_pb2.NodeInfo(role="gateway", incarnation=self.incarnation)
        model = self._model()
        if model is not None:
            info.model.CopyFrom(model)
        tokenizer = self.tokenizer.info
        info.peers.add(
            role="tokenizer",
            address=self.tokenizer.address,
            connected=self.tokenizer.connected,
            incarnation=tokenizer.incarnation if tokenizer is not None else 0,
        )
        for node in self._nodes.values():
            incarnation = node.incarnation if node.usable else 0
            info.peers.add(
                role="decode", address=node.address, connected=node.usable, incarnation=incarnation
            )
        return info

    def load(self) -> node_pb2.Load:
        return node_pb2.Load(
            draining=self._draining,
            requests=len(self._running),
            running=sum(node.requests for node in self._nodes.values()),
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            output_tokens=self._counts["output"],
            finished=self._counts["finished"],
            failed=self._counts["failed"],
            cancelled=self._counts["cancelled"],
        )
