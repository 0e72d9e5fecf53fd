"""The gateway's client of the tokenizer processes. Any process that answers encodes prompts. Their common
vocabulary is fetched once, so that the gateway detokenizes by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.channel import MAX_MESSAGE_BYTES, Dial, open_channel
from baton.rpc.errors import (
    BatonError,
    failed_precondition,
    from_rpc_error,
    from_status,
    internal,
    unavailable,
)
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks, keep_connected, task_is_cancelled
from baton.tokenizer.detokenize import decode
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import node_pb2, node_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

RETRY_SECONDS = 0.1
"""Pause before a call is tried again while no tokenizer answers."""
CONNECT_SECONDS = 10.0
"""Time for a tokenizer's first answers."""
VOCABULARY_SECONDS = 60.0
"""Time for a vocabulary to arrive."""

TEXTS_PER_CALL = 64
"""Texts in one call of `encode_texts`, so that other gateways' prompts come between its calls."""

_LOST_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Status codes of a call whose tokenizer has gone. CANCELLED comes from one that stops."""

_log = get_logger()


class TokenizerPeer:
    """One tokenizer process. It is usable while its health is SERVING and `accept` has not refused it."""

    role = "tokenizer"

    def __init__(
        self, address: str, accept: Callable[[TokenizerPeer, node_pb2.NodeInfo], Awaitable[None]], dial: Dial
    ) -> None:
        self.address = address
        self.info: node_pb2.NodeInfo | None = None
        """None: not usable now."""
        self.stub: Any = None
        """Stub of Tokenizer while connected."""
        self._accept = accept
        self._dial = dial
        self._error: BatonError | None = None
        self._tasks = Tasks()

    @property
    def connected(self) -> bool:
        return self.info is not None

    @property
    def trouble(self) -> BatonError:
        """The error that it cannot be reached, with the reason."""
        return self.gone(self._error)

    def start(self) -> None:
        self._tasks.spawn(keep_connected(self._connect), f"tokenizer {self.address}")

    async def close(self) -> None:
        self.info = None
        await self._tasks.close()

    def gone(self, cause: BatonError | None) -> BatonError:
        why = f": {cause.message}" if cause is not None else ""
        return unavailable(f"tokenizer {self.address} is not reachable{why}", "TOKENIZER_UNAVAILABLE", 1000)

    async def _connect(self) -> bool:
        try:
            async with self._dial(self.address) as channel:
                self.stub = tokenizer_pb2_grpc.TokenizerStub(channel)
                await self._watch(channel)
        except grpc.aio.AioRpcError as error:
            self._error = from_rpc_error(error)
        except TimeoutError:
            self._error = unavailable("it does not answer", "CONNECT_TIMEOUT")
        except BatonError as error:
            self._error = error
        was_connected, self.info = self.connected, None
        if was_connected:
            _log.warning("tokenizer lost", address=self.address, error=self.trouble.message)
        return was_connected

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Follows its health. Raises BatonError, AioRpcError or TimeoutError once it cannot be used."""
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                answer = await health.read()
            while answer is not grpc.aio.EOF:
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    self.info, self._error = None, unavailable("it is starting or draining", "NOT_SERVING")
                elif self.info is None:
                    ask = node_pb2_grpc.NodeStub(channel).GetInfo
                    info = await ask(node_pb2.GetInfoRequest(), timeout=CONNECT_SECONDS)
                    await self._accept(self, info)
                    self.info = info
                answer = await health.read()
            raise unavailable("it closed the connection", "STREAM_CLOSED")
        finally:
            health.cancel()


class TokenizerClient:
    """Several tokenizer processes as one. wait_seconds: how long calls wait while none can be reached."""

    def __init__(self, wait_seconds: float, dial: Dial = open_channel) -> None:
        self.nodes: dict[str, TokenizerPeer] = {}
        self.vocabulary: Vocabulary | None = None
        """Vocabulary of the tokenizers that are or were last connected; None: none yet."""
        self.model: node_pb2.ModelInfo | None = None
        """Model of the tokenizers that are or were last connected; None: none yet."""
        self._wait_seconds = wait_seconds
        self._dial = dial
        self._turn = count()
        self._accepting = asyncio.Lock()
        self._closing = Tasks()

    # Which processes there are.

    def add(self, address: str) -> None:
        """Begins to connect. Idempotent."""
        if address not in self.nodes:
            node = self.nodes[address] = TokenizerPeer(address, self._accept, self._dial)
            node.start()

    def remove(self, address: str) -> None:
        """Removes a node, whose calls are repeated at others."""
        node = self.nodes.pop(address, None)
        if node is not None:
            self._closing.spawn(node.close(), f"leave tokenizer {address}")

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self.nodes.values()))
        await self._closing.close()

    @property
    def connected(self) -> bool:
        return any(node.connected for node in self.nodes.values())

    def trouble(self) -> BatonError:
        """The error that no tokenizer can be reached, with the reason."""
        found = next((node.trouble for node in self.nodes.values() if not node.connected), None)
        return found or unavailable("no tokenizer is known", "TOKENIZER_UNAVAILABLE", 1000)

    async def _accept(self, node: TokenizerPeer, info: node_pb2.NodeInfo) -> None:
        """Makes `vocabulary` the node's. Raises BatonError for a node with another one than those that are
        connected."""
        async with self._accepting:
            hash = info.model.vocabulary_hash
            if self.vocabulary is None or self.vocabulary.hash != hash:
                if self.connected:
                    text = f"tokenizer {node.address} has another vocabulary than the others"
                    raise failed_precondition(f"{text}: start all with the same model", "MODEL_MISMATCH")
                call = node.stub.Vocabulary(tokenizer_pb2.VocabularyRequest(), timeout=VOCABULARY_SECONDS)
                parts = [part async for part in call]
                try:
                    self.vocabulary = await asyncio.to_thread(Vocabulary.of, parts)
                except ValueError as error:
                    raise internal(str(error), "BAD_PEER") from error
            self.model = info.model

    # Calls.

    async def ready(self, timeout: float) -> Vocabulary:
        """The vocabulary; waits for the first tokenizer. Raises BatonError: TOKENIZER_UNAVAILABLE."""
        deadline = time.monotonic() + min(timeout, self._wait_seconds)
        while self.vocabulary is None:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise self.trouble()
            await asyncio.sleep(RETRY_SECONDS)
        return self.vocabulary

    async def encode(
        self,
        encode_input: tokenizer_pb2.EncodeInput,
        timeout: float,
        asking: Callable[[str], None] = lambda address: None,
    ) -> tokenizer_pb2.EncodeResult:
        """Raises BatonError. timeout: seconds. asking: called with the address of each process before it is
        asked."""
        response = await self._encode(_encode_request([encode_input]), timeout, asking)
        if len(response.results) != 1:
            raise internal(f"a tokenizer answered {len(response.results)} of 1 inputs")
        (result,) = response.results
        if result.HasField("error"):
            error = from_status(result.error)
            if error.field is not None:  # "inputs[0].chat.messages[1].role" to "chat.messages[1].role"
                error.field = error.field.partition(".")[2]
            raise error
        return result

    async def encode_texts(
        self, texts: Sequence[str], timeout: float, *, special: bool = True
    ) -> list[list[int]]:
        """Raises BatonError; the field of a text that is wrong is its index, such as "[3]". special: with the
        tokens that the tokenizer puts around a text of its own accord."""
        deadline = time.monotonic() + timeout
        encoded: list[list[int]] = []
        for first in range(0, len(texts), TEXTS_PER_CALL):
            part = texts[first : first + TEXTS_PER_CALL]
            inputs = [tokenizer_pb2.EncodeInput(text=text, add_special_tokens=special) for text in part]
            request = _encode_request(inputs)
            left = max(0.001, deadline - time.monotonic())
            response = await self._encode(request, left, lambda address: None)
            if len(response.results) != len(part):
                raise internal(f"a tokenizer answered {len(response.results)} of {len(part)} inputs")
            for index, result in enumerate(response.results, first):
                if result.HasField("error"):
                    error = from_status(result.error)
                    error.field = f"[{index}]"
                    raise error
                encoded.append(list(result.token_ids))
        return encoded

    async def decode(
        self, token_ids: Sequence[int], timeout: float, *, skip_special_tokens: bool = True
    ) -> str:
        """The text of a whole token sequence."""
        # In a thread: hundreds of thousands of tokens take a tenth of a second.
        return await asyncio.to_thread(decode, await self.ready(timeout), token_ids, skip_special_tokens)

    async def _encode(
        self, request: tokenizer_pb2.EncodeRequest, timeout: float, asking: Callable[[str], None]
    ) -> tokenizer_pb2.EncodeResponse:
        """Calls one tokenizer after the other until one answers. Raises BatonError: TOKENIZER_UNAVAILABLE
        if none does."""
        now = time.monotonic()
        deadline, wait_until = now + timeout, now + self._wait_seconds
        while True:
            error = self.trouble()
            connected = [node for node in self.nodes.values() if node.connected]
            first = next(self._turn)
            for offset in range(len(connected)):
                node = connected[(first + offset) % len(connected)]
                if not node.connected:
                    continue  # by now
                try:
                    asking(node.address)
                    left = max(0.001, deadline - time.monotonic())
                    response: tokenizer_pb2.EncodeResponse = await node.stub.Encode(request, timeout=left)
                    return response
                except asyncio.CancelledError:
                    if task_is_cancelled():
                        raise
                    error = node.gone(None)  # the connection has been closed on this side
                except grpc.aio.AioRpcError as failed:
                    error = from_rpc_error(failed)
                    if error.code not in _LOST_CODES:
                        raise error from failed
                    error = node.gone(error)
            if time.monotonic() + RETRY_SECONDS >= min(deadline, wait_until):
                raise error
            await asyncio.sleep(RETRY_SECONDS)


def _encode_request(inputs: Sequence[tokenizer_pb2.EncodeInput]) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(inputs=inputs, max_answer_bytes=MAX_MESSAGE_BYTES)
