"""The requests behind one HTTP call: one for each of its prompts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from baton.gateway.callers import Caller
from baton.gateway.gateway import Gateway
from baton.gateway.openai_errors import ApiError, from_baton
from baton.gateway.requests import Request
from baton.rpc.errors import from_status
from baton.v1 import inference_pb2

Event = inference_pb2.Delta | inference_pb2.Finished


class Job:
    """They start together, and fail together: the first failure cancels the others."""

    def __init__(
        self, gateway: Gateway, starts: Sequence[inference_pb2.GenerateStart], caller: Caller
    ) -> None:
        self.n = starts[0].n or 1
        self._wake = asyncio.Event()
        self._requests = [gateway.request(start, self._wake.set, caller) for start in starts]
        self._left = set(range(len(starts)))
        self._unaccepted = set(self._left)
        self._taken: deque[tuple[int, Event]] = deque()

    @property
    def name(self) -> str:
        return self._requests[0].name

    async def begin(self) -> None:
        for request in self._requests:
            request.begin()

    def cancel(self, reason: str) -> None:
        """Ends what has not ended."""
        for request in self._requests:
            request.cancel(reason)

    async def wait_for_output(self) -> None:
        """Returns when there is output, or everything has finished. Raises ApiError for a failure.

        Before any output all prompts must have been accepted, so that one that is wrong fails the HTTP
        request, and not its stream.
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
