"""A request that has a gRPC call of its own: Inference.Complete and Inference.Stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from baton.authentication.api_keys import ApiKey
from baton.gateway import admission
from baton.gateway.delta_pieces import pieces
from baton.gateway.gateway import Gateway
from baton.gateway.request import GatewayRequest
from baton.rpc.errors import from_status, invalid
from baton.rpc.message_size import check_answer
from baton.rpc.outbox import byte_size
from baton.v1 import inference_pb2


class SingleRequest:
    """Begins at once. Whoever makes it must `leave` it. A failure of the request is raised as BatonError."""

    def __init__(
        self,
        gateway: Gateway,
        start: inference_pb2.GenerateStart,
        api_key: ApiKey,
        traceparent: str = "",
    ) -> None:
        if start.session:
            raise invalid("start.session", "a session needs a stream of its own: use Inference.Generate")
        if start.id:
            admission.check_id(start.id)
        self._wake = asyncio.Event()
        self._request = GatewayRequest(gateway, start, self._wake.set, api_key, "grpc", traceparent)
        self._request.begin()

    def leave(self) -> None:
        """Cancels the request, unless it has ended."""
        self._request.cancel("the client has gone")

    async def responses(self) -> AsyncGenerator[inference_pb2.StreamResponse]:
        """All events up to `finished`."""
        while not self._request.log.drained:
            self._wake.clear()
            for event in self._request.take():
                kind = event.WhichOneof("kind")
                if kind == "failed":
                    raise from_status(event.failed)
                for piece in pieces(event):
                    yield inference_pb2.StreamResponse(**{kind: getattr(piece, kind)})
            if not self._request.log.more and not self._request.log.drained:
                await self._wake.wait()

    async def answer(self) -> inference_pb2.CompleteResponse:
        answer = inference_pb2.CompleteResponse()
        texts: list[list[str]] = []
        reasoning: list[list[str]] = []
        size = 0
        async for response in self.responses():
            size += byte_size(response)
            check_answer(size, "start", "use Inference.Stream or Inference.Generate")
            kind = response.WhichOneof("kind")
            if kind == "delta":
                delta = response.delta
                while len(texts) <= delta.choice:
                    answer.choices.add()
                    texts.append([])
                    reasoning.append([])
                _append(answer.choices[delta.choice], delta)
                texts[delta.choice].append(delta.text)
                reasoning[delta.choice].append(delta.reasoning)
                answer.prompt_logprobs.extend(delta.prompt_logprobs)
            else:
                getattr(answer, kind).CopyFrom(getattr(response, kind))
        for choice, text, thought in zip(answer.choices, texts, reasoning, strict=True):
            choice.text = "".join(text)
            choice.reasoning = "".join(thought)
        return answer


def _append(choice: inference_pb2.CompleteChoice, delta: inference_pb2.Delta) -> None:
    choice.token_ids.extend(delta.token_ids)
    choice.logprobs.extend(delta.logprobs)
    choice.tool_calls.extend(delta.tool_calls)
    if delta.finish_reason:
        choice.finish_reason = delta.finish_reason
        choice.stop_matched = delta.stop_matched
