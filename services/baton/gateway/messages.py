"""What a decode node is told of a request, and what its client is told at its end."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.attempts import Attempts
from baton.gateway.timing import Timing
from baton.gateway.token_log import TokenLog
from baton.v1 import common_pb2, decode_pb2, inference_pb2


def decode_start(
    number: int,
    start: inference_pb2.GenerateStart,
    prompt_ids: Sequence[int],
    sampling: common_pb2.SamplingParams,
    attempts: Attempts,
    prefill: Sequence[str],
    remaining: float,
    local_prefill_tokens: int | None,
) -> decode_pb2.DecodeStart:
    """The next attempt at a request, with what earlier ones have delivered.

    sampling: complete, with its seed, so that every attempt continues the same sequence. remaining: seconds.
    """
    message = decode_pb2.DecodeStart(
        request=number,
        attempt=attempts.number,
        token_ids=prompt_ids,
        sampling=sampling,
        n=start.n if start.HasField("n") else 1,
        timeout_ms=max(1, int(remaining * 1000)),
        prefill=prefill,
        namespace=start.namespace,
    )
    if local_prefill_tokens is not None:
        message.local_prefill_tokens = local_prefill_tokens
    if start.HasField("priority"):
        message.priority = start.priority
    for tokens in attempts.delivered():
        message.choices.add(token_ids=tokens or (), finished=tokens is None)
    if message.choices:
        message.sampling.ClearField("prompt_logprobs")  # they have come, before the first token
    return message


def finished(
    log: TokenLog, stats: decode_pb2.RequestStats, attempts: Attempts, timing: Timing
) -> inference_pb2.Finished:
    """stats: those of the last attempt; what concerns all attempts is corrected in them."""
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
