"""The gateway's calls of Prefill.Embed and Decode.Embed: which node computes which prompts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from baton.config import GatewayConfig
from baton.gateway.tokenizer_client import TokenizerClient
from baton.gateway.worker_registry import WorkerRegistry
from baton.rpc.channel import Dial
from baton.rpc.errors import BatonError, deadline_exceeded, from_rpc_error, internal, unavailable
from baton.rpc.tasks import task_is_cancelled
from baton.v1 import decode_pb2_grpc, embed_pb2, prefill_pb2_grpc

GROUP_PROMPTS = 32
GROUP_TOKENS = 2**14
"""A call of a node has at most so many prompts, and no further one once it has so many tokens."""
MAX_CALLS = 16
"""Calls of one request at a time."""
RETRY_SECONDS = 0.1
MAX_FAILED_STEPS = 2
"""A prompt may be the cause of the steps that fail."""

_ELSEWHERE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.CANCELLED,
)
"""Another node may do better."""
_LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class EmbeddingWorker:
    """Where prompts can be computed."""

    role: str
    address: str


@dataclass(slots=True)
class _CallGroup:
    """Prompts of one call."""

    first: int
    """Number of the first one in the request."""
    prompts: list[Sequence[int]]
    tokens: int


class EmbeddingClient:
    """Prefill nodes first, then decode nodes; among them the one with the fewest tokens from here. Used on
    one event loop."""

    def __init__(
        self, config: GatewayConfig, nodes: WorkerRegistry, tokenizer: TokenizerClient, dial: Dial
    ) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._nodes = nodes
        self._dial = dial
        self._channels: dict[EmbeddingWorker, grpc.aio.Channel] = {}
        self._outstanding: Counter[EmbeddingWorker] = Counter()
        self._closed = False

    async def close(self) -> None:
        """Calls under way fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def compute(
        self, prompts: Sequence[Sequence[int]], template: embed_pb2.EmbedPrompts, deadline: float
    ) -> list[embed_pb2.Embedding]:
        """One for each prompt, in order. template: all but the prompts. deadline: on the monotonic clock.
        Raises BatonError; the field of a prompt that is wrong is its index, such as "[3]"."""
        found: list[embed_pb2.Embedding] = []
        turn = asyncio.Semaphore(MAX_CALLS)

        async def one(group: _CallGroup) -> Sequence[embed_pb2.Embedding]:
            async with turn:
                return await self._compute(group, template, deadline)

        try:
            async with asyncio.TaskGroup() as calls:
                tasks = [calls.create_task(one(group)) for group in _groups(prompts)]
        except* BatonError as failed:
            first: BaseException = failed
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        for task in tasks:
            found.extend(task.result())
        return found

    async def _compute(
        self, group: _CallGroup, template: embed_pb2.EmbedPrompts, deadline: float
    ) -> Sequence[embed_pb2.Embedding]:
        message = embed_pb2.EmbedPrompts(prompts=[{"token_ids": prompt} for prompt in group.prompts])
        message.MergeFrom(template)
        wait_until = time.monotonic() + self._config.resume_wait_seconds
        failed_steps = 0
        while True:
            error: BatonError | None = None
            for worker in self._workers():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise deadline_exceeded("the embeddings were not computed in time")
                try:
                    return await self._call(worker, message, group, left)
                except BatonError as failed:
                    if failed.code not in _ELSEWHERE:
                        raise
                    failed_steps += failed.reason == "STEP_FAILED"
                    if failed_steps >= MAX_FAILED_STEPS:
                        text = f"the prompts were in {failed_steps} steps that failed: {failed.message}"
                        raise internal(text, "REPEATED_STEP_FAILURE") from None
                    if error is None or error.code not in _LATER:
                        error = failed
            error = error or unavailable("no prefill or decode node can be reached", "NO_DECODE_NODE", 1000)
            now = time.monotonic()
            if error.code not in _LATER or self._closed or now + RETRY_SECONDS >= min(deadline, wait_until):
                raise error
            await asyncio.sleep(RETRY_SECONDS)

    def _workers(self) -> list[EmbeddingWorker]:
        prefill = [EmbeddingWorker("prefill", address) for address in self._nodes.prefill]
        decode = [
            EmbeddingWorker("decode", node.address) for node in self._nodes.decode.values() if node.usable
        ]
        return [*sorted(prefill, key=self._tokens_at), *sorted(decode, key=self._tokens_at)]

    def _tokens_at(self, worker: EmbeddingWorker) -> int:
        return self._outstanding[worker]

    async def _call(
        self, worker: EmbeddingWorker, message: embed_pb2.EmbedPrompts, group: _CallGroup, seconds: float
    ) -> Sequence[embed_pb2.Embedding]:
        stub = await self._stub(worker)
        self._outstanding[worker] += group.tokens
        try:
            answer: embed_pb2.PromptEmbeddings = await stub.Embed(message, timeout=seconds)
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise unavailable(f"the connection to {worker.address} was closed", "CONNECTION_CLOSED") from None
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed)
            if error.field is not None and error.field.startswith("prompts["):
                index = int(error.field.removeprefix("prompts[").partition("]")[0])
                error.field = f"[{group.first + index}]"
            raise error from None
        finally:
            self._outstanding[worker] -= group.tokens
            if not self._outstanding[worker]:
                del self._outstanding[worker]
        if len(answer.embeddings) != len(group.prompts):
            text = f"{worker.address} answered {len(answer.embeddings)} of {len(group.prompts)} prompts"
            raise internal(text, "BAD_PEER")
        return answer.embeddings

    async def _stub(self, worker: EmbeddingWorker) -> Any:
        if self._closed:
            raise unavailable("the gateway is stopping", "STOPPING", 1000)
        channel = self._channels.get(worker)
        if channel is None:
            # Not the connection of anything else: embeddings are large.
            channel = self._channels[worker] = self._dial(worker.address)
            known = {*self._nodes.prefill, *self._nodes.decode, worker.address}
            gone = [self._channels.pop(each) for each in list(self._channels) if each.address not in known]
            await asyncio.gather(*(each.close() for each in gone))
        made = prefill_pb2_grpc.PrefillStub if worker.role == "prefill" else decode_pb2_grpc.DecodeStub
        return made(channel)


def _groups(prompts: Sequence[Sequence[int]]) -> list[_CallGroup]:
    groups: list[_CallGroup] = []
    for number, prompt in enumerate(prompts):
        last = groups[-1] if groups else None
        if last is None or len(last.prompts) >= GROUP_PROMPTS or last.tokens + len(prompt) > GROUP_TOKENS:
            groups.append(_CallGroup(number, [prompt], len(prompt)))
        else:
            last.prompts.append(prompt)
            last.tokens += len(prompt)
    return groups
