"""Converts events of baton.v1.Inference to the OpenAI API's answers, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from baton.gateway.authentication import ApiKey
from baton.gateway.gateway import Gateway
from baton.gateway.openai_errors import ApiError, from_baton
from baton.gateway.requests import Request
from baton.rpc.errors import from_status
from baton.v1 import common_pb2, inference_pb2

Event = inference_pb2.Delta | inference_pb2.Finished


class RequestBatch:
    """The requests of one HTTP call, one for each prompt. The first failure cancels the others."""

    def __init__(
        self, gateway: Gateway, starts: Sequence[inference_pb2.GenerateStart], api_key: ApiKey
    ) -> None:
        self.n = starts[0].n or 1
        self._wake = asyncio.Event()
        self._requests = [Request(gateway, start, self._wake.set, api_key) for start in starts]
        self._left = set(range(len(starts)))
        self._unaccepted = set(self._left)
        self._taken: deque[tuple[int, Event]] = deque()

    @property
    def name(self) -> str:
        return self._requests[0].name

    def begin(self) -> None:
        for request in self._requests:
            request.begin()

    def cancel(self, reason: str) -> None:
        """Cancels the requests that have not ended."""
        for request in self._requests:
            request.cancel(reason)

    async def wait_for_output(self) -> None:
        """Returns when there is output, or all have finished. Raises ApiError for a failure.

        Nothing is sent before, so that a request that fails until then gets its own HTTP status. All prompts
        must have been accepted by then, so that a wrong one fails the HTTP request and not its stream.
        """
        while self._waiting:
            self._wake.clear()
            self._take()
            if self._waiting:
                await self._wake.wait()

    @property
    def _waiting(self) -> bool:
        return bool(self._left) and (not self._taken or bool(self._unaccepted))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Deltas with the choice's number over all prompts, and each request's end. Raises ApiError."""
        while True:
            await self.wait_for_output()
            if not self._taken:
                return
            yield self._taken.popleft()

    def _take(self) -> None:
        for number in sorted(self._left):
            request = self._requests[number]
            while events := request.take():
                for event in events:
                    self._sort(number, request, event)

    def _sort(self, number: int, request: Request, event: inference_pb2.GenerateResponse) -> None:
        kind = event.WhichOneof("kind")
        if kind == "delta":
            self._taken.append((number * self.n + event.delta.choice, event.delta))
        elif kind == "accepted":
            self._unaccepted.discard(number)
        elif kind == "finished":
            self._left.discard(number)
            self._taken.append((number, event.finished))
        elif kind == "failed":
            self.cancel("another prompt of the same HTTP request has failed")
            raise self._error(number, event)

    def _error(self, number: int, event: inference_pb2.GenerateResponse) -> ApiError:
        error = from_baton(from_status(event.failed))
        param = error.param
        if len(self._requests) > 1 and param is not None and (param + "[").startswith("prompt["):
            error.param = f"prompt[{number}]{param.removeprefix('prompt')}"
            if param != "prompt":
                error.message = error.message.replace(param, error.param)
        return error


Json = dict[str, Any]

_FINISH = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


class Answer(ABC):
    """One HTTP answer; choices are numbered over all prompts, as OpenAI does (prompt times n plus choice)."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, name: str, model: str, choices: int, include_usage: bool) -> None:
        self._head: Json = {"id": f"{self.prefix}-{name}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[common_pb2.PositionLogprobs]] = [[] for _ in range(choices)]
        self._finish: list[str | None] = [None] * choices
        self._prompt_tokens = self._output_tokens = self._cached_tokens = self._resumed = 0

    def add(self, index: int, delta: inference_pb2.Delta) -> None:
        """Takes new output of choice `index`, for `whole`."""
        self._texts[index].append(delta.text)
        self._logprobs[index].extend(delta.logprobs)
        self._finish[index] = _FINISH.get(delta.finish_reason) or self._finish[index]

    def chunk_of(self, index: int, delta: inference_pb2.Delta) -> Json:
        """New output of choice `index`, as a chunk of a stream."""
        logprobs = self._format_logprobs(index, delta.logprobs) if delta.logprobs else None
        finish = _FINISH.get(delta.finish_reason)
        return self.chunk(
            [{"index": index, **self._part(delta.text), "logprobs": logprobs, "finish_reason": finish}]
        )

    def add_end(self, finished: inference_pb2.Finished) -> None:
        """One of the answer's prompts has finished."""
        usage = finished.usage
        self._resumed += finished.resumed
        self._prompt_tokens += usage.prompt_tokens
        self._output_tokens += usage.output_tokens
        self._cached_tokens += usage.cached_tokens

    def opening(self) -> list[Json]:
        """Chunks that come before all output."""
        return []

    def closing(self) -> list[Json]:
        """Chunks that come after all output."""
        return [{**self.chunk([]), "usage": self._usage()}] if self._include_usage else []

    def chunk(self, choices: list[Json]) -> Json:
        head = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**head, "usage": None} if self._include_usage else head

    def whole(self) -> Json:
        choices = [
            {
                "index": index,
                **self._complete("".join(texts)),
                "logprobs": self._format_logprobs(index, logprobs) if logprobs else None,
                "finish_reason": self._finish[index],
            }
            for index, (texts, logprobs) in enumerate(zip(self._texts, self._logprobs, strict=True))
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._output_tokens,
            "total_tokens": self._prompt_tokens + self._output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            # Beyond OpenAI's.
            "resumed": self._resumed,
        }

    @abstractmethod
    def _part(self, text: str) -> Json: ...

    @abstractmethod
    def _complete(self, text: str) -> Json: ...

    @abstractmethod
    def _format_logprobs(self, index: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> Json: ...


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        return [
            self.chunk([{"index": index, "delta": role, "logprobs": None, "finish_reason": None}])
            for index in range(len(self._texts))
        ]

    def _part(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _complete(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _format_logprobs(self, index: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> Json:
        content = [
            {**_entry(position.chosen), "top_logprobs": [_entry(top) for top in position.top]}
            for position in logprobs
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self, name: str, model: str, choices: int, include_usage: bool, echoes: Sequence[str] | None
    ) -> None:
        """echoes: for each choice the prompt's text, which the answer then begins with."""
        super().__init__(name, model, choices, include_usage)
        self._echoes = echoes
        self._offsets = [0] * choices
        for index, echo in enumerate(echoes or ()):
            self._texts[index].append(echo)

    def opening(self) -> list[Json]:
        return [
            self.chunk([{"index": index, "text": echo, "logprobs": None, "finish_reason": None}])
            for index, echo in enumerate(self._echoes or ())
        ]

    def _part(self, text: str) -> Json:
        return {"text": text}

    def _complete(self, text: str) -> Json:
        return {"text": text}

    def _format_logprobs(self, index: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> Json:
        tokens = [_text(position.chosen) for position in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        tops = [{_text(top): top.logprob for top in position.top} for position in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [position.chosen.logprob for position in logprobs],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }


def _text(entry: common_pb2.TokenLogprob) -> str:
    return entry.token_bytes.decode("utf-8", "replace")


def _entry(entry: common_pb2.TokenLogprob) -> Json:
    return {"token": _text(entry), "logprob": entry.logprob, "bytes": list(entry.token_bytes)}
