"""The workers that a gateway uses: found by configuration, DNS and etcd; they come and go at run time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from baton.config import GatewayConfig
from baton.discovery.etcd import Etcd
from baton.discovery.finder import Change, Finder
from baton.gateway.cache_view import FRESH_SECONDS, Gap
from baton.gateway.decode_node import DecodePeer
from baton.gateway.routing import Router
from baton.gateway.tokenizer import Tokenizer
from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, from_rpc_error, unavailable
from baton.rpc.logs import get_logger
from baton.v1 import cache_pb2, cache_pb2_grpc, node_pb2


class Discovery:
    """Used on one event loop."""

    def __init__(self, config: GatewayConfig, nodes: Nodes) -> None:
        """Raises BatonError for an invalid address, and for unusable files for etcd."""
        self._nodes = nodes
        etcd = Etcd.load(config)
        self._finders = [
            Finder(role, _addresses(config, role), etcd, partial(self._changed, role)) for role in ROLES
        ]

    def start(self) -> None:
        for finder in self._finders:
            finder.start()

    @property
    def places(self) -> list[str]:
        """Sources of nodes, each once; for messages."""
        return list(dict.fromkeys(place for finder in self._finders for place in finder.searches))

    def _changed(self, role: str, change: Change) -> None:
        for address in change.left:
            self._nodes.remove(role, address)
        for address in change.joined:
            self._nodes.add(role, address)

    async def close(self) -> None:
        await asyncio.gather(*(finder.close() for finder in self._finders))


def _addresses(config: GatewayConfig, role: str) -> tuple[str, ...]:
    """Configured addresses; without etcd, the defaults of one machine."""
    given: tuple[str, ...] = getattr(config, role)
    return () if config.etcd and given == getattr(GatewayConfig(), role) else given


FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 2.0
UNKNOWN_SECONDS = 30.0
"""A node without the service is asked again after this time: it may have been replaced."""

_log = get_logger()


class CacheWatch:
    """Reconnects as long as it is open. The view stays meanwhile."""

    def __init__(self, address: str, router: Router, dial: Dial = open_channel) -> None:
        self.address = address
        self._router = router
        self._dial = dial
        self._task: asyncio.Task[None] | None = None
        self._left = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"cache of {self.address}")

    def leave(self) -> None:
        """The node has been removed: forgets its view at once. Idempotent."""
        if self._task is not None and not self._left:
            self._left = True
            self._task.cancel()
            self._router.forget(self.address)

    async def close(self) -> None:
        """Calls `leave` and returns when nothing is open any more."""
        self.leave()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff, reason = FIRST_BACKOFF_SECONDS, ""
        while True:
            heard = self._router.view(self.address).heard
            try:
                await self._follow()
            except BatonError as error:
                if self._router.view(self.address).heard != heard:
                    backoff, reason = FIRST_BACKOFF_SECONDS, ""
                if error.reason != reason:
                    reason = error.reason
                    _log.info("cache not followed", node=self.address, reason=reason, error=error.message)
                if error.code is grpc.StatusCode.UNIMPLEMENTED:
                    backoff = UNKNOWN_SECONDS
            except Exception:
                _log.exception("cache not followed", node=self.address)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _follow(self) -> None:
        """One stream to its end. Raises BatonError."""
        view = self._router.view(self.address)
        async with self._dial(self.address) as channel:
            request = cache_pb2.WatchRequest(incarnation=view.incarnation, sequence=view.sequence)
            call = cache_pb2_grpc.CacheStub(channel).Watch(request)
            try:
                while True:
                    async with asyncio.timeout(FRESH_SECONDS):
                        update = await call.read()
                    if update is grpc.aio.EOF:
                        raise unavailable(f"{self.address} closed the stream", "STREAM_CLOSED")
                    view.apply(update, self._router.clock())
                    self._router.settle(self.address)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            except TimeoutError:
                raise unavailable(f"{self.address} has gone silent", "CACHE_SILENT") from None
            except Gap as gap:
                _log.warning("cache told with a gap", node=self.address, error=str(gap))
                raise unavailable(str(gap), "PROTOCOL") from gap
            finally:
                call.cancel()


ROLES = ("tokenizer", "decode", "prefill")


class Nodes:
    """By role and address. Used on one event loop. `add` begins to connect and keeps trying.

    make_decode: makes the DecodeNode of an address. make_watch: makes the CacheWatch of a prefill or decode
    node.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        make_decode: Callable[[str], DecodePeer],
        make_watch: Callable[[str], CacheWatch],
    ) -> None:
        self.tokenizer = tokenizer
        self.prefill: list[str] = []
        """Prefill nodes; decode nodes connect to them."""
        self.decode: dict[str, DecodePeer] = {}
        self._make_decode = make_decode
        self._make_watch = make_watch
        self._watches: dict[str, CacheWatch] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def add(self, role: str, address: str) -> None:
        """Adds a node that requests may be sent to. Idempotent."""
        if role == "tokenizer":
            self.tokenizer.add(address)
        elif role == "prefill":
            if address not in self.prefill:
                self.prefill.append(address)
                self._watch(address)
        elif role == "decode":
            if address not in self.decode:
                node = self.decode[address] = self._make_decode(address)
                node.start()
                self._watch(address)
        else:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")

    def remove(self, role: str, address: str) -> None:
        """Removes a node; its requests continue elsewhere. Idempotent.

        A draining node need not be removed; it says so itself.
        """
        if role == "tokenizer":
            self.tokenizer.remove(address)
        elif role == "prefill":
            if address in self.prefill:
                self.prefill.remove(address)
                self._unwatch(address)
        elif role == "decode":
            node = self.decode.pop(address, None)
            if node is not None:
                node.leaving = True
                node.lose(unavailable(f"decode node {address} was removed", "DECODE_LOST", 1000))
                self._leave(node.close())
                self._unwatch(address)
        else:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")

    def _watch(self, address: str) -> None:
        watch = self._watches[address] = self._make_watch(address)
        watch.start()

    def _unwatch(self, address: str) -> None:
        watch = self._watches.pop(address)
        watch.leave()
        self._leave(watch.close())

    def _leave(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        await asyncio.gather(
            *(node.close() for node in self.decode.values()),
            *(watch.close() for watch in self._watches.values()),
            *self._closing,
            self.tokenizer.close(),
        )

    def candidates(self, request: int, fingerprint: str) -> list[str]:
        """Decode nodes that could take the request now and serve the model it began with."""
        return [
            node.address
            for node in self.decode.values()
            if node.takes(request) and node.info is not None and node.info.model.fingerprint == fingerprint
        ]

    def missing(self) -> list[str]:
        """Why no request can be served now; empty: requests are served."""
        missing = []
        if not self.tokenizer.connected:
            missing += [f"tokenizer {address}" for address in self.tokenizer.nodes] or ["tokenizer"]
        if not any(node.usable for node in self.decode.values()):
            nodes = [f"decode {node.address}: {node.trouble}" for node in self.decode.values()]
            missing += nodes or ["decode"]
        return missing

    def models(self) -> Iterator[node_pb2.ModelInfo]:
        """Models of the decode nodes that can be reached."""
        return (node.info.model for node in self.decode.values() if node.reached and node.info is not None)

    def describe(self) -> Iterator[node_pb2.Peer]:
        """For NodeInfo."""
        for tokenizer in self.tokenizer.nodes.values():
            incarnation = tokenizer.info.incarnation if tokenizer.info is not None else 0
            yield node_pb2.Peer(
                role="tokenizer",
                address=tokenizer.address,
                connected=tokenizer.connected,
                incarnation=incarnation,
            )
        for node in self.decode.values():
            incarnation = node.incarnation if node.reached else 0
            yield node_pb2.Peer(
                role="decode", address=node.address, connected=node.reached, incarnation=incarnation
            )
