"""What is told of a request at its end: to the client, and in the request log."""

from __future__ import annotations

from baton.gateway.metrics import RequestTimer
from baton.gateway.request_log import EndedRequest
from baton.gateway.resume import ResumeAttempts
from baton.gateway.token_log import TokenLog
from baton.v1 import common_pb2, decode_pb2, inference_pb2

DECODE_PHASES = ("queue", "prefill", "pull", "decode")
"""That a decode node measures."""


def finished_event(
    log: TokenLog, stats: decode_pb2.RequestStats, attempts: ResumeAttempts, timing: RequestTimer
) -> inference_pb2.Finished:
    """stats: of the last attempt; figures that concern all attempts are corrected in place."""
    stats.prompt_tokens = len(log.prompt_ids)
    stats.output_tokens = log.output_tokens
    if attempts.resumed or not stats.cached_tokens:
        stats.cached_tokens = log.cached_tokens
        stats.ClearField("cached_tiers")
    usage = inference_pb2.Usage(
        prompt_tokens=stats.prompt_tokens,
        output_tokens=stats.output_tokens,
        cached_tokens=stats.cached_tokens,
        reasoning_tokens=sum(choice.reasoning_tokens for choice in log.choices),
        drafted_tokens=stats.drafted_tokens,
        accepted_drafts=stats.accepted_drafts,
        image_tokens=log.image_tokens,
        cached_tiers=stats.cached_tiers if stats.HasField("cached_tiers") else None,
    )
    return inference_pb2.Finished(
        usage=usage,
        stats=stats,
        ttft_us=timing.ttft_us,
        total_us=int(timing.elapsed * 1e6),
        decode_address=attempts.address,
        resumed=attempts.resumed,
    )


def ended_request(
    log: TokenLog,
    stats: decode_pb2.RequestStats | None,
    attempts: ResumeAttempts,
    timing: RequestTimer,
    *,
    request: str,
    api: str,
    key: str,
    model: str,
) -> EndedRequest:
    """For the request log. stats: None where no attempt has finished."""
    way = "" if stats is None else "split" if stats.prefill_address else "local"
    stats = stats or decode_pb2.RequestStats()
    phases = dict(timing.phases)
    for name in DECODE_PHASES:
        if microseconds := getattr(stats, f"{name}_us"):
            phases[name] = microseconds / 1e6
    if timing.ttft_us:
        phases["ttft"] = timing.ttft_us / 1e6
    choices = log.choices  # of a request with n = 0, none
    finish = common_pb2.FinishReason.Name(choices[0].finish_reason if choices else 0)
    return EndedRequest(
        request,
        len(log.prompt_ids),
        log.output_tokens,
        attempts.resumed,
        timing.elapsed,
        api=api,
        key=key,
        model=model,
        cached_tokens=log.cached_tokens,
        image_tokens=log.image_tokens,
        finish=finish.removeprefix("FINISH_REASON_").lower().removesuffix("unspecified"),
        way=way,
        decode=attempts.address,
        prefill=stats.prefill_address,
        retries=stats.handoff_retries,
        phases=phases,
    )
