"""The Tokenizer service as the gateway uses it, whichever of its processes answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

from baton.gateway.tokenizer_node import TextSink, TokenizerNode
from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, from_status, internal, unavailable
from baton.v1 import node_pb2, tokenizer_pb2

RETRY_SECONDS = 0.1
"""Pause before a call is tried again while no tokenizer answers."""

NO_STREAM = 0
"""The id of a token stream that no tokenizer holds at the moment: what is pushed to it is dropped."""


class Tokenizer:
    """Several tokenizer processes as one. A token stream lives at one of them; when that one is lost, the
    stream's sink opens it anew at another, or at the same one once it is back.

    wait_seconds: how long calls and token streams wait while none can be reached.
    """

    def __init__(self, wait_seconds: float, dial: Dial = open_channel) -> None:
        self.nodes: dict[str, TokenizerNode] = {}
        self._wait_seconds = wait_seconds
        self._dial = dial
        self._ids = count(1)
        self._at: dict[int, TokenizerNode] = {}  # where each token stream lives
        self._homeless: dict[TextSink, asyncio.TimerHandle] = {}
        self._turn = count()
        self._closing: set[asyncio.Task[None]] = set()

    # Which processes there are.

    def add(self, address: str) -> None:
        """Begins to connect. Idempotent."""
        if address not in self.nodes:
            node = TokenizerNode(address, self._welcome, self._lost, self._dial)
            self.nodes[address] = node
            node.start()

    def remove(self, address: str) -> None:
        """Its token streams go on at others."""
        node = self.nodes.pop(address, None)
        if node is not None:
            node.lose_streams(unavailable(f"tokenizer {address} was removed", "TOKENIZER_UNAVAILABLE"))
            task = asyncio.get_running_loop().create_task(node.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for timer in self._homeless.values():
            timer.cancel()
        await asyncio.gather(*(node.close() for node in self.nodes.values()), *self._closing)

    @property
    def info(self) -> node_pb2.NodeInfo | None:
        return next((node.info for node in self.nodes.values() if node.connected), None)

    @property
    def connected(self) -> bool:
        return any(node.connected for node in self.nodes.values())

    @property
    def chat(self) -> bool:
        return self.info is not None and self.info.model.chat

    @property
    def streams(self) -> int:
        """Token streams that are open, or wait for a tokenizer."""
        return sum(len(node.sinks) for node in self.nodes.values()) + len(self._homeless)

    # Calls.

    async def encode(
        self, inputs: Sequence[tokenizer_pb2.EncodeInput], timeout: float
    ) -> list[tokenizer_pb2.EncodeResult]:
        """Encodes; raises the BatonError of the first input that cannot be."""
        request = tokenizer_pb2.EncodeRequest(inputs=inputs)
        response = await self._call(lambda node, left: node.encode(request, left), timeout)
        for result in response.results:
            if result.HasField("error"):
                error = from_status(result.error)
                if error.field is not None:  # "inputs[0].chat.messages[1].role" to "chat.messages[1].role"
                    _, _, field = error.field.partition(".")
                    error.message = error.message.replace(error.field, field)
                    error.field = field
                raise error
        if len(response.results) != len(inputs):
            raise internal(f"a tokenizer answered {len(response.results)} of {len(inputs)} inputs")
        return list(response.results)

    async def decode(self, token_ids: Sequence[int], timeout: float) -> str:
        """The text of a whole token sequence, special tokens left out."""
        sequence = tokenizer_pb2.TokenSequence(token_ids=token_ids)
        request = tokenizer_pb2.DecodeRequest(sequences=[sequence])
        response = await self._call(lambda node, left: node.decode(request, left), timeout)
        return str(response.texts[0])

    async def _call(self, ask: Callable[[TokenizerNode, float], Awaitable[Any]], timeout: float) -> Any:
        """Asks them in turn until one answers. Raises BatonError: TOKENIZER_UNAVAILABLE when none does."""
        now = time.monotonic()
        deadline, patience = now + timeout, now + self._wait_seconds
        while True:
            error = self.trouble()
            connected = [node for node in self.nodes.values() if node.connected]
            first = next(self._turn)
            for offset in range(len(connected)):
                node = connected[(first + offset) % len(connected)]
                if not node.connected:
                    continue  # by now
                try:
                    return await ask(node, max(0.001, deadline - time.monotonic()))
                except BatonError as failed:
                    if failed.reason != "TOKENIZER_UNAVAILABLE":
                        raise
                    error = failed
            if time.monotonic() + RETRY_SECONDS >= min(deadline, patience):
                raise error
            await asyncio.sleep(RETRY_SECONDS)

    def trouble(self) -> BatonError:
        """That no tokenizer can be reached, and why."""
        found = next((node.trouble for node in self.nodes.values() if not node.connected), None)
        return found or unavailable("no tokenizer is known", "TOKENIZER_UNAVAILABLE", 1000)

    # Token streams.

    def open(self, sink: TextSink) -> int:
        """A new token stream, opened by its first item; NO_STREAM: the sink is told when one can be had."""
        nodes = [node for node in self.nodes.values() if node.connected]
        node = min(nodes, key=lambda node: len(node.sinks), default=None)
        if node is None:
            self._wait_for_home(sink, self.trouble())
            return NO_STREAM
        id = next(self._ids)
        node.sinks[id] = sink
        self._at[id] = node
        return id

    def push(self, id: int) -> tokenizer_pb2.DetokenizeItem | None:
        """An item to be filled in now. None: the stream has no tokenizer; once it has one, what is unanswered
        is sent again."""
        node = self._at.get(id)
        return node.push(id) if node is not None and id in node.sinks else None

    def close_stream(self, id: int, sink: TextSink) -> None:
        """The owner wants no more text."""
        timer = self._homeless.pop(sink, None)
        if timer is not None:
            timer.cancel()
        node = self._at.pop(id, None)
        if node is not None:
            node.close_stream(id)

    def _wait_for_home(self, sink: TextSink, error: BatonError) -> None:
        if sink not in self._homeless:
            loop = asyncio.get_running_loop()
            self._homeless[sink] = loop.call_later(self._wait_seconds, self._give_up, sink, error)

    def _give_up(self, sink: TextSink, error: BatonError) -> None:
        if self._homeless.pop(sink, None) is not None:
            sink.on_detokenizer_lost(error)

    def _lost(self, sinks: list[TextSink], error: BatonError) -> None:
        self._at = {id: node for id, node in self._at.items() if id in node.sinks}
        for sink in sinks:
            sink.on_tokenizer_changed()

    def _welcome(self) -> None:
        """A tokenizer has become usable."""
        homeless, self._homeless = self._homeless, {}
        for sink, timer in homeless.items():
            timer.cancel()
            sink.on_tokenizer_changed()
