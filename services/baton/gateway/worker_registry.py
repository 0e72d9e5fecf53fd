"""The workers that a gateway uses: found by configuration, DNS and etcd; they come and go at run time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import grpc.aio

from baton.config import GatewayConfig
from baton.discovery.etcd import Etcd
from baton.discovery.finder import Finder, MembershipChange
from baton.gateway.cache_view import FRESH_SECONDS, Gap
from baton.gateway.decode_client import DecodeClient
from baton.gateway.routing import Router
from baton.gateway.runtime import Cancellable, GatewayRuntime
from baton.gateway.tokenizer_client import TokenizerClient, TokenizerPeer
from baton.rpc.channel import Dial
from baton.rpc.errors import BatonError, from_rpc_error, unavailable
from baton.rpc.logs import get_logger
from baton.v1 import cache_pb2, cache_pb2_grpc, node_pb2

ROLES = ("tokenizer", "decode", "prefill", "encode")
WORKERS = ("decode", "prefill")
UNKNOWN_SECONDS = 30.0
"""A node without the service is asked again after this time: it may have been replaced."""

_log = get_logger()


class WorkerRegistry:
    """By role and address. Used on one event loop. `add` begins to connect and keeps trying."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: TokenizerClient,
        router: Router,
        runtime: GatewayRuntime,
        accept: Callable[[node_pb2.NodeInfo], None],
    ) -> None:
        """accept: see DecodeClient. Raises BatonError for an invalid address, and for unusable files for
        etcd."""
        self.tokenizer = tokenizer
        self.prefill: list[str] = []
        """Prefill nodes; decode nodes connect to them."""
        self.encode: list[str] = []
        """Encode nodes; those who compute prompts connect to them."""
        self.decode: dict[str, DecodeClient] = {}
        self._router = router
        self._runtime = runtime
        self._accept = accept
        self._silence = config.silence_seconds
        self._following: dict[str, Cancellable] = {}
        self._listed: dict[str, dict[str, None]] = {}
        """Prefill and decode nodes: the roles that sources list each as, in their order."""
        self._told: dict[str, str] = {}
        """The role that a worker says it has."""
        etcd = Etcd.load(config)
        self._finders = [
            Finder(role, _addresses(config, role), etcd, partial(self._changed, role)) for role in ROLES
        ]

    def start(self) -> None:
        for finder in self._finders:
            finder.start()

    async def close(self) -> None:
        await asyncio.gather(*(finder.close() for finder in self._finders))
        await asyncio.gather(*(node.close() for node in self.decode.values()), self.tokenizer.close())

    @property
    def searches(self) -> list[str]:
        """Sources of nodes, each once; for messages."""
        return list(dict.fromkeys(search for finder in self._finders for search in finder.searches))

    def _changed(self, role: str, change: MembershipChange) -> None:
        for address in change.left:
            self.remove(role, address)
        for address in change.joined:
            self.add(role, address)

    def add(self, role: str, address: str) -> None:
        """Adds a node that requests may be sent to. Idempotent."""
        if role == "tokenizer":
            self.tokenizer.add(address)
        elif role == "encode" and address not in self.encode:
            self.encode.append(address)
        elif role in WORKERS:
            self._listed.setdefault(address, {})[role] = None
            self._add(address)

    def remove(self, role: str, address: str) -> None:
        """Removes a node; its requests continue elsewhere. Idempotent.

        A draining node need not be removed; it says so itself.
        """
        if role == "tokenizer":
            self.tokenizer.remove(address)
        elif role == "encode" and address in self.encode:
            self.encode.remove(address)
        elif role in WORKERS and address in self._listed:
            self._listed[address].pop(role, None)
            if not self._listed[address]:
                del self._listed[address]
                self._told.pop(address, None)
            self._add(address)

    def told_role(self, address: str, role: str) -> None:
        """The worker says what it is. That counts, whatever lists it; empty: it does not say."""
        if role in WORKERS and address in self._listed and self._told.get(address) != role:
            self._told[address] = role
            self._add(address)

    def _add(self, address: str) -> None:
        """Uses a worker as what it says it is, else as what it is listed as; if nothing lists it, not at
        all."""
        listed = self._listed.get(address, {})
        role = self._told.get(address, next(iter(listed), ""))
        if role and address not in self._following:
            self._following[address] = self._runtime.follow_load(address)
        if role != "decode" and address in self.decode:
            node = self.decode.pop(address)
            node.leaving = True
            node.lose(unavailable(f"decode node {address} was removed", "DECODE_LOST", 1000))
            self._runtime.spawn(node.close(), f"leave decode node {address}")
        if role != "prefill" and address in self.prefill:
            self.prefill.remove(address)
        if role == "prefill" and address not in self.prefill:
            self.prefill.append(address)
        if role == "decode" and address not in self.decode:
            node = self.decode[address] = DecodeClient(address, self._silence, self._accept, self._runtime)
            node.start()
        if not role and address in self._following:
            self._following.pop(address).cancel()
            self._router.forget(address)

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
        lost = self.unusable()
        if len(lost) == len(self.decode):
            missing += [f"decode {node}" for node in lost] or ["decode"]
        return missing

    def unusable(self) -> list[str]:
        """Decode nodes that cannot be used, each with the reason."""
        return [f"{node.address} ({node.trouble})" for node in self.decode.values() if not node.usable]

    def models(self) -> Iterator[node_pb2.ModelInfo]:
        """Models of the decode nodes that can be reached."""
        return (node.info.model for node in self.decode.values() if node.connected and node.info is not None)

    def describe(self) -> Iterator[node_pb2.Peer]:
        """For NodeInfo."""
        nodes: list[TokenizerPeer | DecodeClient] = [*self.tokenizer.nodes.values(), *self.decode.values()]
        for node in nodes:
            peer = node_pb2.Peer(role=node.role, address=node.address, connected=node.connected)
            if node.connected and node.info is not None:
                peer.incarnation = node.info.incarnation
            yield peer
        reporting = set(self._router.reporting())
        yield from (
            node_pb2.Peer(role="prefill", address=address, connected=address in reporting)
            for address in self.prefill
        )
        yield from (node_pb2.Peer(role="encode", address=address) for address in self.encode)


def _addresses(config: GatewayConfig, role: str) -> tuple[str, ...]:
    """Configured addresses; without etcd, the defaults of one machine."""
    addresses: tuple[str, ...] = getattr(config, role)
    return () if config.etcd and addresses == getattr(GatewayConfig(), role) else addresses


class CacheWatch:
    """Keeps the router's view of a node up to date. The view stays while the node cannot be reached."""

    def __init__(
        self, address: str, router: Router, dial: Dial, told_role: Callable[[str, str], None]
    ) -> None:
        """told_role: see WorkerRegistry."""
        self._address = address
        self._told_role = told_role
        self._router = router
        self._dial = dial
        self._reason = ""

    async def connect(self) -> bool:
        """One stream to its end. Returns whether an update came."""
        updated = self._router.view(self._address).updated
        try:
            await _follow(self._address, self._router, self._dial, self._told_role)
        except BatonError as error:
            followed = self._router.view(self._address).updated != updated
            if followed or error.reason != self._reason:
                _log.info("cache not followed", node=self._address, reason=error.reason, error=error.message)
            self._reason = error.reason
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                await asyncio.sleep(UNKNOWN_SECONDS)
            return followed
        except Exception:
            _log.exception("cache not followed", node=self._address)
        return False


async def _follow(address: str, router: Router, dial: Dial, told_role: Callable[[str, str], None]) -> None:
    """One stream to its end. Raises BatonError."""
    view = router.view(address)
    async with dial(address) as channel:
        request = cache_pb2.WatchRequest(incarnation=view.incarnation, sequence=view.sequence)
        call = cache_pb2_grpc.CacheStub(channel).Watch(request)
        try:
            while True:
                async with asyncio.timeout(FRESH_SECONDS):
                    update = await call.read()
                if update is grpc.aio.EOF:
                    raise unavailable(f"{address} closed the stream", "STREAM_CLOSED")
                router.update(address, update)
                told_role(address, update.role)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError:
            raise unavailable(f"{address} has gone silent", "CACHE_SILENT") from None
        except Gap as gap:
            _log.warning("cache update with a gap", node=address, error=str(gap))
            raise unavailable(str(gap), "PROTOCOL") from gap
        finally:
            call.cancel()
