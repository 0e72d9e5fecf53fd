"""Converts events of baton.v1.Inference to the OpenAI API's answers, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress

from baton.api.field_names import OPENAI, FieldNames
from baton.api.openai_errors import from_baton
from baton.api.openai_fields import Json
from baton.api.openai_protocol import CommonRequest
from baton.api.stream_positions import StreamPosition
from baton.api.usage_details import add_usage_details, usage_details
from baton.authentication.api_keys import ApiKey
from baton.gateway.gateway import Gateway
from baton.gateway.request import GatewayRequest
from baton.rpc.errors import from_status
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2

FIRST_BYTE_SECONDS = 5.0
"""A stream begins after this time also if its request still waits: proxies give silent servers up."""
InferenceEvent = inference_pb2.Delta | inference_pb2.Finished
RETRY_SECONDS = 0.05
"""A call that waits for its next prompt to begin, and has none running, looks again after this time."""


class RequestBatch:
    """The requests of one HTTP call, one for each prompt. The first failure cancels the others. Prompts that
    may not run yet, by the gateway's or the key's limit, begin when others have ended."""

    def __init__(
        self,
        gateway: Gateway,
        starts: Sequence[inference_pb2.GenerateStart],
        api_key: ApiKey,
        traceparent: str = "",
        names: FieldNames = OPENAI,
        resume: inference_pb2.GenerateResume | None = None,
        counts: tuple[int, int] | None = None,
    ) -> None:
        """traceparent: the client's trace context; empty: it has none. names: of fields, in errors. resume:
        another gateway had begun the one request. counts: of events that its client has."""
        self._gateway = gateway
        self._api_key = api_key
        self.n = starts[0].n or 1
        self.clamped = False
        """max_tokens of a prompt that has been accepted was reduced to the room that there is."""
        self._max_tokens = starts[0].sampling.max_tokens
        self.ping_seconds = gateway.config.stream_ping_seconds
        self._names = names
        self._wake = asyncio.Event()
        self._requests = [
            GatewayRequest(gateway, start, self._wake.set, api_key, "http", traceparent, resume)
            for start in starts
        ]
        self.position = StreamPosition(starts, resume, counts)
        self._requests[0].resumption.replay = True
        self._begun = 0
        self._retry: asyncio.TimerHandle | None = None
        self._left = set(range(len(starts)))
        self._unaccepted = set(self._left)
        self._taken: deque[tuple[int, InferenceEvent]] = deque()
        self.prompt_tokens = 0
        """Number of tokens of all prompts that have been accepted."""

    def keep_log(self, possible: bool, counted: bool = False) -> None:
        """If the gateway dies, another goes on with the stream, if its form makes that possible. counted: ids
        of its events have counts. To be called before anything is awaited. Raises ApiError."""
        self._requests[0].resumption.keep_log = self.position.keep(possible, counted)

    @property
    def ticket(self) -> str:
        """With which another gateway goes on with the stream; empty: none does."""
        if self._unaccepted:
            self._take()
        return self.position.ticket if self._requests[0].resumption.keep_log else ""

    @property
    def prompts(self) -> int:
        return len(self._requests)

    def prompt_ids(self, prompt: int) -> Sequence[int]:
        """The tokens of an accepted prompt."""
        return self._requests[prompt].log.prompt_ids

    @property
    def conversation(self) -> list[tokenizer_pb2.ChatMessage] | None:
        """Messages of the first prompt, whose images are digests; None: it has none, or is not accepted."""
        prompt = self._requests[0].prompt
        if prompt is None or not prompt.images or prompt.conversation is None:
            return None
        return list(prompt.conversation.messages)

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of an accepted prompt's tokens."""
        vocabulary = self._gateway.tokenizer.vocabulary
        assert vocabulary is not None
        return vocabulary

    def stop_matched(self, index: int, stop_token_ids: Sequence[int]) -> str | int | None:
        """What ended choice `index` over all prompts: a stop string, one of the tokens, or something else."""
        choice = self._requests[index // self.n].log.choices[index % self.n]
        if choice.ended_early:
            return choice.stop_matched or None
        return choice.token_ids[-1] if choice.token_ids[-1] in stop_token_ids else None

    @property
    def name(self) -> str:
        return self._requests[0].resumption.first

    def begin(self) -> None:
        """Begins the prompts that may run now; the first is refused if it may not. Called once, and by this
        class when a prompt has ended."""
        while self._begun < len(self._requests):
            if self._begun and not self._gateway.has_room(self._api_key):
                if len(self._left) > len(self._requests) - self._begun:
                    return  # one runs, whose end calls this
                if self._requests[self._begun].seconds_left > 0:
                    self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self.begin)
                    return
            self._begun += 1
            self._requests[self._begun - 1].begin()

    def cancel(self, reason: str) -> None:
        """Cancels the requests that have not ended."""
        self._begun = len(self._requests)
        if self._retry is not None:
            self._retry.cancel()
        for request in self._requests:
            request.cancel(reason)

    async def wait_for_start(self) -> None:
        """Returns when a stream may begin: decode nodes have admitted all prompts, there is output, or
        FIRST_BYTE_SECONDS are over. Raises ApiError for a failure, which thus has its own HTTP status."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_BYTE_SECONDS):
                await self._wait(lambda: self._waiting and not all(each.admitted for each in self._requests))

    async def wait_for_output(self) -> None:
        """Returns when all prompts have been accepted and there is output, or all have finished. Raises
        ApiError for a failure."""
        await self._wait(lambda: self._waiting)

    async def _wait(self, waiting: Callable[[], bool]) -> None:
        while waiting():
            self._wake.clear()
            self._take()
            if waiting():
                await self._wake.wait()

    @property
    def _waiting(self) -> bool:
        return bool(self._left) and (not self._taken or bool(self._unaccepted))

    async def events(self) -> AsyncIterator[tuple[int, InferenceEvent]]:
        """Deltas with the choice's number over all prompts, and each request's end. Raises ApiError."""
        while True:
            if self._waiting:
                await self.wait_for_output()
            if not self._taken:
                return
            yield self._taken.popleft()

    async def merged_events(self) -> AsyncIterator[tuple[int, InferenceEvent]]:
        """What `events` gives, with one delta for each choice, at the end."""
        merged: dict[int, inference_pb2.Delta] = {}
        texts: dict[int, list[tuple[str, str]]] = {}
        async for index, event in self.events():
            if isinstance(event, inference_pb2.Finished):
                yield index, event
                continue
            merged.setdefault(index, inference_pb2.Delta()).MergeFrom(event)
            texts.setdefault(index, []).append((event.text, event.reasoning))
        for index, delta in merged.items():
            delta.text, delta.reasoning = map("".join, zip(*texts[index], strict=True))
            yield index, delta

    def _take(self) -> None:
        for number in sorted(self._left):
            request = self._requests[number]
            while events := request.take():
                for event in events:
                    self._sort(number, event)
        self.begin()

    def _sort(self, number: int, event: inference_pb2.GenerateResponse) -> None:
        kind = event.WhichOneof("kind")
        if kind == "delta":
            self._taken.append((number * self.n + event.delta.choice, event.delta))
        elif kind == "accepted":
            self._unaccepted.discard(number)
            self.position.ticket = event.accepted.resume_ticket
            self.prompt_tokens += event.accepted.prompt_tokens
            self.clamped |= event.accepted.max_tokens < self._max_tokens
        elif kind == "finished":
            self._left.discard(number)
            self._taken.append((number, event.finished))
        elif kind == "failed":
            self.cancel("another prompt of the same HTTP request has failed")
            prompt = number if len(self._requests) > 1 else None
            raise from_baton(from_status(event.failed), self._names, prompt)


_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class OpenAIAnswer(ABC):
    """One HTTP answer; choices are numbered over all prompts, as OpenAI does (prompt times n plus choice)."""

    prefix: str
    kind: str
    chunk_kind: str
    resumable = True
    """Whether the answer's stream can go on at another gateway."""

    def __init__(self, job: RequestBatch, request: CommonRequest) -> None:
        self._choices = job.prompts * job.n
        self._head: Json = {
            "id": f"{self.prefix}-{job.name}",
            "created": int(time.time()),
            "model": request.model,
        }
        self._include_usage = request.usage_in_stream
        self._usage_in_chunks = request.usage_in_chunks
        self._stop_token_ids = request.stop_token_ids or ()
        self._job = job
        self._output_tokens = self._cached_tokens = self._reasoning_tokens = self._resumed = 0
        self._usage_details = inference_pb2.Usage()
        """What `usage_details` tells of, summed over all prompts."""

    def add(self, index: int, delta: inference_pb2.Delta) -> list[Json]:
        """New output of choice `index`, as chunks of a stream."""
        if self._usage_in_chunks:
            self._output_tokens += len(delta.token_ids)
        logprobs = self._format_logprobs(index, delta.logprobs) if delta.logprobs else None
        finish = _FINISH.get(delta.finish_reason)
        part = self._part(index, delta)
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish}
        if finish:
            choice["stop_reason"] = self._stop_reason(index, finish)
        return [self.chunk([choice])]

    def add_end(self, finished: inference_pb2.Finished) -> None:
        """One of the answer's prompts has finished."""
        usage = finished.usage
        self._resumed += finished.resumed
        if not self._usage_in_chunks:  # else they have been counted
            self._output_tokens += usage.output_tokens
        self._cached_tokens += usage.cached_tokens
        self._reasoning_tokens += usage.reasoning_tokens
        add_usage_details(self._usage_details, usage)

    def opening(self) -> list[Json]:
        """Chunks that a stream begins with, before it is known whether there will be output."""
        return []

    async def begin(self) -> list[Json]:
        """Chunks that come right before the first output."""
        return []

    def closing(self) -> list[Json]:
        """Chunks that come after all output."""
        return [{**self.chunk([]), "usage": self._usage()}] if self._include_usage else []

    def chunk(self, choices: list[Json]) -> Json:
        head = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._usage_in_chunks:
            return {**head, "usage": self._usage()}
        return {**head, "usage": None} if self._include_usage else head

    def whole(self, chunks: Iterable[Json]) -> Json:
        """What a stream of these chunks tells, in which each choice's output is one."""
        parts: list[list[Json]] = [[] for _ in range(self._choices)]
        for chunk in chunks:
            for choice in chunk["choices"]:
                parts[choice["index"]].append(choice)
        choices = [self._complete(each) for each in parts]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _stop_reason(self, index: int, finish: str) -> str | int | None:
        if finish == "length":
            return None
        return self._job.stop_matched(index, self._stop_token_ids)

    def _usage(self) -> Json:
        details = {"resumed": self._resumed, **usage_details(self._usage_details)}
        return {
            "prompt_tokens": self._job.prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": self._job.prompt_tokens + self._output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "baton": details,
        }

    @abstractmethod
    def _part(self, index: int, delta: inference_pb2.Delta) -> Json: ...

    @abstractmethod
    def _complete(self, parts: Sequence[Json]) -> Json: ...

    @abstractmethod
    def _format_logprobs(self, index: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> Json: ...


class ChatAnswer(OpenAIAnswer):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, job: RequestBatch, request: CommonRequest) -> None:
        super().__init__(job, request)
        self._calls = [0] * self._choices
        """Tool calls of each choice."""

    def opening(self) -> list[Json]:
        role = {"role": "assistant", "content": None}  # an empty text would begin one
        return [
            self.chunk([{"index": index, "delta": role, "logprobs": None, "finish_reason": None}])
            for index in range(self._choices)
        ]

    def _part(self, index: int, delta: inference_pb2.Delta) -> Json:
        part: Json = {}
        if delta.reasoning:
            part["reasoning_content"] = delta.reasoning
        if delta.text:
            part["content"] = delta.text
        if delta.tool_calls:
            numbered = enumerate(delta.tool_calls, self._calls[index])
            part["tool_calls"] = [{"index": number, **_call(call)} for number, call in numbered]
            self._calls[index] += len(delta.tool_calls)
        return {"delta": part}

    def _complete(self, parts: Sequence[Json]) -> Json:
        (choice,) = parts
        delta = choice.pop("delta")
        for call in delta.get("tool_calls", ()):
            del call["index"]
        message = {"role": "assistant", "content": None if "tool_calls" in delta else "", "refusal": None}
        return {"index": choice.pop("index"), "message": {**message, "annotations": [], **delta}, **choice}

    def _format_logprobs(self, index: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> Json:
        content = [
            {**_entry(position.chosen), "top_logprobs": [_entry(top) for top in position.top]}
            for position in logprobs
        ]
        return {"content": content, "refusal": None}


def _call(call: tokenizer_pb2.ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _entry(entry: common_pb2.TokenLogprob) -> Json:
    token = entry.token_bytes.decode("utf-8", "replace")
    return {"token": token, "logprob": entry.logprob, "bytes": list(entry.token_bytes)}
