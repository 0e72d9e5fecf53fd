"""Builds the messages of a request: to a decode node, and to the client at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from baton.gateway.attempts import Attempts
from baton.gateway.metrics import RequestTimer
from baton.gateway.token_log import TokenLog
from baton.rpc.validate import MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from baton.v1 import common_pb2, decode_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's options besides its prompt. Plain values: any part of a message keeps the whole message
    alive."""

    n: int = 1
    namespace: str = ""
    priority: int | None = None
    prompt_logprobs: bool = False
    hand_off: bool | None = None
    """The client's choice where the prompt is computed; None: --split decides."""

    @classmethod
    def of(cls, start: inference_pb2.GenerateStart) -> Self:
        return cls(
            n=start.n if start.HasField("n") else 1,
            namespace=start.namespace,
            priority=start.priority if start.HasField("priority") else None,
            prompt_logprobs=start.sampling.HasField("prompt_logprobs"),
            hand_off=start.hand_off if start.HasField("hand_off") else None,
        )


def new_log(start: inference_pb2.GenerateStart) -> TokenLog:
    """A token log for an unchecked request: what the log keeps is bounded here."""
    sampling = start.sampling
    return TokenLog(
        start.id,
        n=min(start.n, MAX_CHOICES) if start.HasField("n") else 1,
        stop=[text[:MAX_STOP_CHARACTERS] for text in sampling.stop[:MAX_STOP_STRINGS]],
        min_tokens=sampling.min_tokens,
        include_token_ids=start.include_token_ids if start.HasField("include_token_ids") else True,
        await_prompt_logprobs=sampling.HasField("prompt_logprobs"),
    )


def decode_start(
    number: int,
    options: RequestOptions,
    prompt_ids: Sequence[int],
    sampling: common_pb2.SamplingParams,
    attempts: Attempts,
    prefill: Sequence[str],
    remaining: float,
    local_prefill_tokens: int | None,
) -> decode_pb2.DecodeStart:
    """The next attempt at a request, with the output that earlier ones delivered.

    sampling: complete, with its seed, so that every attempt continues the same sequence. remaining: seconds.
    """
    message = decode_pb2.DecodeStart(
        request=number,
        attempt=attempts.number,
        token_ids=prompt_ids,
        sampling=sampling,
        n=options.n,
        timeout_ms=max(1, int(remaining * 1000)),
        prefill=prefill,
        namespace=options.namespace,
        priority=options.priority,
        failed_steps=attempts.failed_steps,
    )
    if local_prefill_tokens is not None:
        message.local_prefill_tokens = local_prefill_tokens
    for tokens in attempts.delivered():
        message.choices.add(token_ids=tokens or (), finished=tokens is None)
    if message.choices:
        message.sampling.ClearField("prompt_logprobs")  # they have come, before the first token
    return message


def finished(
    log: TokenLog, stats: decode_pb2.RequestStats, attempts: Attempts, timing: RequestTimer
) -> inference_pb2.Finished:
    """stats: of the last attempt; figures that concern all attempts are corrected."""
    stats.prompt_tokens = len(log.prompt_ids)
    stats.output_tokens = log.output_tokens
    if attempts.resumed or not stats.cached_tokens:
        stats.cached_tokens = log.cached_tokens
    usage = inference_pb2.Usage(
        prompt_tokens=stats.prompt_tokens,
        output_tokens=stats.output_tokens,
        cached_tokens=stats.cached_tokens,
    )
    return inference_pb2.Finished(
        usage=usage,
        stats=stats,
        ttft_us=timing.ttft_us,
        total_us=int(timing.elapsed * 1e6),
        decode_address=attempts.address,
        resumed=attempts.resumed,
    )
