"""The workers that a gateway uses. They may come and go while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from baton.gateway.cache_watch import CacheWatch
from baton.gateway.decode_node import DecodeNode
from baton.gateway.tokenizer import Tokenizer
from baton.rpc.errors import unavailable
from baton.v1 import node_pb2

ROLES = ("tokenizer", "decode", "prefill")


class Nodes:
    """By role and address. Used on one event loop; `add` begins to connect, and goes on trying.

    make_decode: makes the gateway's side of the decode node at an address. make_watch: what follows the cache
    of the prefill or decode node there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        make_decode: Callable[[str], DecodeNode],
        make_watch: Callable[[str], CacheWatch],
    ) -> None:
        self.tokenizer = tokenizer
        self.prefill: list[str] = []
        """Prefill nodes; decode nodes connect to them."""
        self.decode: dict[str, DecodeNode] = {}
        self._make_decode = make_decode
        self._make_watch = make_watch
        self._watches: dict[str, CacheWatch] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def add(self, role: str, address: str) -> None:
        """A node that requests may be sent to from now on. Idempotent."""
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
        """A node that is to be left: what runs there goes on elsewhere. Idempotent.

        One that only drains need not be removed; it says so itself.
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
        """Decode nodes that could take the request now and serve the model that it was begun with."""
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
        """Of the decode nodes that can be reached."""
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
