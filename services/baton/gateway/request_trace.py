"""What the gateway's recorder learns of a request: its events, and its span, whose attributes are those of
OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.gateway.token_log import TokenLog
from baton.tracing.recorder import TOKENS_EVERY, EventKind
from baton.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from baton.gateway.shell import GatewayShell

_SAMPLING = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
"""Field of SamplingParams -> attribute below gen_ai.request."""


class RequestTrace:
    """The events and the span of one request of the gateway."""

    def __init__(
        self, gateway: GatewayShell, number: int, start: inference_pb2.GenerateStart, traceparent: str
    ) -> None:
        """number: the request's. traceparent: the client's trace context; empty: it has none."""
        self._gateway, self._recorder = gateway, gateway.recorder
        self._name = (gateway.incarnation, number)
        self.context = self._begin_span(start, traceparent)
        """Trace context of the span; empty: the request is not traced."""
        self._attempt = -1
        """The last attempt of which the first token has come."""
        self._unrecorded = 0
        """Output tokens since the last event TOKENS."""
        self._written = False

    def add(self, kind: EventKind, *, attempt: int = 0, number: int = 0, text: str = "") -> None:
        self._recorder.add(kind, *self._name, attempt, number=number, text=text)

    def begun(self, attempt: int) -> None:
        """Tokens of the attempt have come."""
        if self._attempt != attempt:
            self._attempt = attempt
            self.add(EventKind.FIRST_TOKEN, attempt=attempt)

    def tokens(self, count: int, log: TokenLog) -> None:
        """The log has that many more."""
        self._unrecorded += count
        if self._unrecorded >= TOKENS_EVERY:
            self._unrecorded = 0
            self.add(EventKind.TOKENS, attempt=self._attempt, number=log.output_tokens)

    def written(self) -> None:
        """Events are written to the client."""
        if not self._written and self._attempt >= 0:
            self._written = True
            self.add(EventKind.WRITTEN)

    def ended(self, log: TokenLog, reason: str) -> None:
        if self.context:
            self._describe_span(log)
        self.add(EventKind.ENDED, number=log.output_tokens, text=reason)

    def _begin_span(self, start: inference_pb2.GenerateStart, traceparent: str) -> str:
        if self._recorder.spans is None:
            return ""
        operation = "chat" if start.WhichOneof("prompt") == "chat" else "text_completion"
        model = start.model[:256] or self._gateway.model_name
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": model,
            "baton.request": f"{self._name[0]:016x}-{self._name[1]}",
        }
        for field, name in _SAMPLING.items():
            if start.sampling.HasField(field):
                attributes[f"gen_ai.request.{name}"] = getattr(start.sampling, field)
        if start.HasField("n") and start.n != 1:
            attributes["gen_ai.request.choice.count"] = start.n
        name = f"{operation} {model}".rstrip()
        return self._recorder.begin_span(
            *self._name, operation=name, traceparent=traceparent, attributes=attributes
        )

    def _describe_span(self, log: TokenLog) -> None:
        """Adds what is known at the end."""
        if self._recorder.spans is None:
            return
        reasons = [
            common_pb2.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower()
            for choice in log.choices
            if choice.finish_reason
        ]
        self._recorder.spans.describe(
            (*self._name, 0, 0),
            {
                "gen_ai.response.model": self._gateway.model_name,
                "gen_ai.usage.input_tokens": len(log.prompt_ids),
                "gen_ai.usage.output_tokens": log.output_tokens,
                "gen_ai.response.finish_reasons": reasons,
            },
        )
