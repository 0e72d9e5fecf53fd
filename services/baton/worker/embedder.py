"""Prefill.Embed and Decode.Embed: prompts whose embeddings are wanted, in the steps of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from baton.config import WorkerConfig
from baton.engine.plan import Pooling, Vector
from baton.engine.request import EmbeddedEvent, EngineRequest, FailedEvent, Refused
from baton.engine.sampling_params import SamplingParams
from baton.rpc.errors import (
    BatonError,
    deadline_exceeded,
    exhausted,
    failed_precondition,
    internal,
    invalid,
    invalid_field,
    unavailable,
    without_frames,
)
from baton.rpc.message_size import check_embeddings
from baton.rpc.validate import check_enums, check_token_ids
from baton.v1 import embed_pb2, node_pb2
from baton.worker.core import WorkerCore
from baton.worker.shell import Steps

MAX_PROMPTS = 256
"""Most prompts of a call."""
_POOLING = {
    embed_pb2.POOLING_UNSPECIFIED: Pooling.LAST,
    embed_pb2.POOLING_LAST: Pooling.LAST,
    embed_pb2.POOLING_MEAN: Pooling.MEAN,
}


@dataclass(frozen=True, eq=False, slots=True)
class EmbedKey:
    """Names a prompt in the scheduler, and leads to who waits for it."""

    index: int
    """Among the call's prompts."""
    done: asyncio.Future[None]


class Embedder:
    """Used on the event loop, but for what is passed to `steps.call`."""

    def __init__(self, config: WorkerConfig, steps: Steps[Any], info: node_pb2.ModelInfo) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        """Prompts whose callers wait."""
        self._config = config
        self._steps = steps
        self._info = info

    @property
    def running(self) -> int:
        """Prompts whose callers wait."""
        return len(self._waiting)

    def hand_back(self) -> None:
        """Fails all, so that their callers ask other nodes."""
        for future in self._waiting:
            if not future.done():
                future.set_exception(unavailable("this node is draining; use another one", "DRAINING"))
                future.exception()  # a call fails with that of its first prompt

    async def embed(self, message: embed_pb2.EmbedPrompts, seconds: float) -> embed_pb2.PromptEmbeddings:
        """Raises BatonError. A caller that is cancelled cancels its prompts."""
        check(message, self._info)
        futures, requests = self._requests(message)
        seconds = min(seconds, self._config.request_seconds)
        self._waiting.update(futures)
        try:
            async with asyncio.timeout(seconds):
                self._steps.call(lambda core, now: self._submit(core, requests))
                await asyncio.gather(*futures)
        except TimeoutError:
            raise deadline_exceeded(f"the prompts were not computed within {seconds:g} s") from None
        finally:
            self._waiting.difference_update(futures)
            self._steps.call(lambda core, now: _close(core, requests))
        return embed_pb2.PromptEmbeddings(
            embeddings=[self._embedding(message, request) for request in requests]
        )

    def _requests(
        self, message: embed_pb2.EmbedPrompts
    ) -> tuple[list[asyncio.Future[None]], list[EngineRequest]]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[None]] = [loop.create_future() for _ in message.prompts]
        return futures, [
            EngineRequest(
                key=EmbedKey(index, futures[index]),
                prompt=tuple(prompt.token_ids),
                params=SamplingParams(),
                namespace=message.namespace,
                priority=message.priority,
                pooling=_POOLING[message.pooling or self._info.default_pooling],
            )
            for index, prompt in enumerate(message.prompts)
        ]

    def _submit(self, core: WorkerCore, requests: Sequence[EngineRequest]) -> None:
        """In the step thread."""
        for request in requests:
            try:
                core.scheduler.submit(request)
            except Refused as refused:
                core.scheduler.close(request)
                core.scheduler.embedded.append(FailedEvent(request, refused.reason, refused.message))

    def _embedding(self, message: embed_pb2.EmbedPrompts, request: EngineRequest) -> embed_pb2.Embedding:
        assert request.pooled is not None
        vector = pooled(request.pooled, len(request.prompt) if request.pooling is Pooling.MEAN else 1)
        if message.HasField("dimensions"):
            vector = vector[: message.dimensions]
        asked, info = message.HasField("normalize"), self._info
        if message.normalize if asked else info.default_normalize or not info.HasField("default_normalize"):
            vector = normalized(vector)
        cached = request.cached_tokens or 0
        return embed_pb2.Embedding(values=vector, prompt_tokens=len(request.prompt), cached_tokens=cached)

    def deliver(self, events: Sequence[EmbeddedEvent | FailedEvent]) -> None:
        for event in events:
            key = event.request.key
            assert isinstance(key, EmbedKey)
            if key.done.done():
                continue  # nobody waits for it any more
            if isinstance(event, EmbeddedEvent):
                key.done.set_result(None)
            else:
                key.done.set_exception(_error(event, f"prompts[{key.index}].token_ids"))
                key.done.exception()  # another prompt's error may be the one that is raised


def check(message: embed_pb2.EmbedPrompts, info: node_pb2.ModelInfo) -> None:
    """Raises BatonError naming the field."""
    if not info.embedding_size:
        text = "this node computes no embeddings: with --step-profile it computes nothing"
        raise BatonError(grpc.StatusCode.UNIMPLEMENTED, "NO_EMBEDDINGS", text)
    if message.fingerprint not in ("", info.fingerprint):
        raise failed_precondition(f"this node serves another model, {info.name!r}", "MODEL_MISMATCH")
    if not 1 <= len(message.prompts) <= MAX_PROMPTS:
        raise invalid("prompts", f"1 to {MAX_PROMPTS} prompts a call, not {len(message.prompts)}")
    check_enums(message)
    if message.HasField("dimensions") and not 1 <= message.dimensions <= info.embedding_size:
        text = f"must be in [1, {info.embedding_size}], not {message.dimensions}"
        raise invalid_field("dimensions", text)
    check_embeddings(len(message.prompts), message.dimensions or info.embedding_size, "prompts")
    for index, prompt in enumerate(message.prompts):
        field, size = f"prompts[{index}].token_ids", len(prompt.token_ids)
        if not size:
            raise invalid_field(field, "is empty: a prompt has at least one token", "EMPTY_PROMPT")
        if size > info.context_length:
            text = f"has {size} tokens; this node holds at most {info.context_length}"
            raise invalid_field(field, text, "PROMPT_TOO_LONG")
        check_token_ids(prompt.token_ids, info.vocab_size, field)


def _close(core: WorkerCore, requests: Sequence[EngineRequest]) -> None:
    """In the step thread: ends those that have not ended."""
    for request in requests:
        core.scheduler.close(request)


def _error(event: FailedEvent, field: str) -> BatonError:
    if event.reason == "STEP_FAILED":
        return unavailable(event.message, event.reason)
    if event.reason == "QUEUE_FULL":
        return exhausted(event.message, event.reason, 1000)
    if event.reason in ("PROMPT_TOO_LONG", "EMPTY_PROMPT"):
        return invalid(field, event.message, event.reason)
    return without_frames(internal(event.message, event.reason))


def pooled(summed: Vector, count: int) -> Vector:
    return summed / np.float32(count)


def normalized(vector: Vector) -> Vector:
    """The vector scaled to length 1; a zero vector stays zero."""
    length = np.linalg.norm(vector)
    return vector / length if length > 0 else vector
