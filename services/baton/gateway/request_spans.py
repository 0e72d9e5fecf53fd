"""The gateway's span of a request, with attributes by OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.gateway.token_log import TokenLog
from baton.tracing.recorder import Recorder
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


def request_span(
    recorder: Recorder,
    gateway: GatewayShell,
    number: int,
    start: inference_pb2.GenerateStart,
    traceparent: str,
) -> str:
    """Begins the span; returns its trace context, which is empty if the request is not traced."""
    if recorder.spans is None:
        return ""
    operation = "chat" if start.WhichOneof("prompt") == "chat" else "text_completion"
    model = start.model[:256] or gateway.model_name
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "baton.request": f"{gateway.incarnation:016x}-{number}",
    }
    for field, name in _SAMPLING.items():
        if start.sampling.HasField(field):
            attributes[f"gen_ai.request.{name}"] = getattr(start.sampling, field)
    if start.HasField("n") and start.n != 1:
        attributes["gen_ai.request.choice.count"] = start.n
    name = f"{operation} {model}".rstrip()
    return recorder.begin_span(
        gateway.incarnation, number, operation=name, traceparent=traceparent, attributes=attributes
    )


def describe_span(recorder: Recorder, gateway: GatewayShell, number: int, log: TokenLog) -> None:
    """Adds what is known at the end."""
    if recorder.spans is None:
        return
    reasons = [
        common_pb2.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower()
        for choice in log.choices
        if choice.finish_reason
    ]
    recorder.spans.describe(
        (gateway.incarnation, number, 0, 0),
        {
            "gen_ai.response.model": gateway.model_name,
            "gen_ai.usage.input_tokens": len(log.prompt_ids),
            "gen_ai.usage.output_tokens": log.output_tokens,
            "gen_ai.response.finish_reasons": reasons,
        },
    )
