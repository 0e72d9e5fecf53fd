"""What a simulated worker lends out of its prefix tree."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from baton.sim.streams import VirtualPrefillStream
from baton.v1 import prefill_pb2
from baton.worker.lease_stream import LeaseStream
from baton.worker.sources.shell import CacheLending

if TYPE_CHECKING:
    from baton.sim.worker import Worker


class SimLending(CacheLending):
    """While it lies, what it lends is mostly of other tokens than those asked for."""

    def __init__(self, worker: Worker[Any]) -> None:
        super().__init__(worker, VirtualPrefillStream)
        self.lies_until = 0.0
        self._worker = worker

    def handle_command(self, request: prefill_pb2.PrefillRequest, stream: LeaseStream) -> None:
        world = self._worker.world
        if request.WhichOneof("kind") == "cached" and world.now < self.lies_until:
            rng, tree = world.rng(f"lies {self._worker.name}"), self._worker.cache._tree
            namespace, key = tree.path_key(rng.choice(list(tree._root.subtree())))
            tokens = array("I", key)[: len(request.cached.token_ids)]
            if tokens and rng.random() < 0.8:
                lie = prefill_pb2.CachedPrompt(namespace=namespace, token_ids=tokens)
                lie.attempt.CopyFrom(request.cached.attempt)
                request = prefill_pb2.PrefillRequest(cached=lie)
        super().handle_command(request, stream)
