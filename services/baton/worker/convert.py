"""Between messages of baton.v1 and the engine's types."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from types import MappingProxyType

import grpc
from google.rpc import status_pb2

from baton.engine.image_spans import with_placeholders
from baton.engine.plan import Logprobs
from baton.engine.request import EngineFinishReason, EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.grammar.base import GrammarSpec
from baton.handoff.messages import AttemptName
from baton.kvcache.host_tier import CachedTiers
from baton.rpc.errors import BatonError, invalid, invalid_field, to_status
from baton.rpc.validate import (
    check_choices,
    check_generates,
    check_sampling,
    check_token_ids,
    require_grammars,
)
from baton.v1 import common_pb2, decode_pb2, node_pb2, prefill_pb2
from baton.worker.images.spans import check_images, source_from, spans_from

FINISH_REASONS = {
    EngineFinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    EngineFinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def layout_difference(prefill: common_pb2.Layout, decode: common_pb2.Layout) -> str | None:
    """Which fields of two nodes' page layouts differ, and how; None: the nodes may exchange pages.

    The text is logged by the other node, too, and so names both by their roles.
    """
    first, second = _layout_fields(prefill), _layout_fields(decode)
    differences = [
        f"{name} is {first.get(name, 'absent')} at the prefill node and {second.get(name, 'absent')} at the "
        "decode node"
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]
    if not differences:
        return None
    text = "; ".join(differences)
    return f"the page layouts differ ({text}): start both nodes with the same model and options"


def _layout_fields(layout: common_pb2.Layout) -> dict[str, object]:
    fields: dict[str, object] = {
        "model_fingerprint": layout.model_fingerprint,
        "page_size": layout.page_size,
        "version": layout.version,
    }
    for index, group in enumerate(layout.groups):
        for name in ("kind", "layers", "bytes_per_token", "dtype", "window", "scales"):
            fields[f"groups[{index}].{name}"] = getattr(group, name)
    return fields


def sampling_from(
    message: common_pb2.SamplingParams, eos: Iterable[int], default_max_tokens: int
) -> SamplingParams:
    """Checked parameters as the engine takes them; absent fields get the contract's defaults."""
    stop = frozenset(message.stop_token_ids)
    if not message.ignore_eos:
        stop |= frozenset(eos)
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        seed=message.seed,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default_max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=stop,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=grammar_from(message.grammar) if message.HasField("grammar") else None,
    )


def grammar_from(message: common_pb2.Grammar) -> GrammarSpec:
    """Grammar of a checked message."""
    kind = message.WhichOneof("kind")
    assert kind is not None, "not checked"
    if kind == "json_object":
        return GrammarSpec(kind)
    if kind == "choice":
        return GrammarSpec(kind, choices=tuple(message.choice.strings))
    return GrammarSpec(kind, getattr(message, kind))


def grammar_to(spec: GrammarSpec) -> common_pb2.Grammar:
    if spec.kind == "json_object":
        return common_pb2.Grammar(json_object=common_pb2.JsonObject())
    if spec.kind == "choice":
        return common_pb2.Grammar(choice=common_pb2.StringChoice(strings=spec.choices))
    message = common_pb2.Grammar()
    setattr(message, spec.kind, spec.text)
    return message


def check_start(
    start: decode_pb2.DecodeStart | prefill_pb2.PrefillStart, n: int, info: node_pb2.ModelInfo
) -> None:
    """What both kinds have in common. Raises BatonError naming the field."""
    token_ids, delivered, sampling = start.token_ids, start.delivered, start.sampling
    check_generates(info)
    vocab_size, context_length = info.vocab_size, info.context_length
    if not token_ids:
        raise invalid_field("token_ids", "is empty: a prompt has at least one token", "EMPTY_PROMPT")
    if len(token_ids) > context_length:
        text = f"has {len(token_ids)} tokens; this node holds at most {context_length}"
        raise invalid_field("token_ids", text, "PROMPT_TOO_LONG")
    check_token_ids(token_ids, vocab_size, "token_ids")
    if not 0 <= delivered < len(token_ids):
        raise invalid_field("delivered", "must be less than the number of token_ids")
    check_choices(n)
    if delivered and n > 1:
        raise invalid_field("n", "must be 1 with delivered: only DecodeStart.choices resumes several choices")
    check_sampling(sampling, vocab_size, "sampling", allow_stop=False)
    require_grammars(sampling, info.grammars)
    check_images(start, info)
    if sampling.HasField("max_tokens") and delivered >= sampling.max_tokens:
        raise invalid_field("delivered", "must be less than sampling.max_tokens: nothing is left to do")


def delivered_from(
    start: decode_pb2.DecodeStart, n: int, context_length: int
) -> tuple[tuple[int, ...] | None, ...]:
    """What `start` says to have been delivered, as engine.request.Request takes it; for a checked start.

    Raises BatonError naming the field.
    """
    if not start.choices:
        cut = len(start.token_ids) - start.delivered
        return (tuple(start.token_ids[cut:]),) if start.delivered else ()
    if start.delivered or len(start.choices) != n:
        text = f"has {len(start.choices)} entries: one for each of n ({n}), and none beside delivered"
        raise invalid_field("choices", text)
    if all(choice.finished for choice in start.choices):
        raise invalid("choices", "all choices have finished: nothing is left to do")
    if n > 1 and start.sampling.HasField("prompt_logprobs"):
        raise invalid("sampling.prompt_logprobs", "prompt_logprobs is not for a resume of several choices")
    most = start.sampling.max_tokens if start.sampling.HasField("max_tokens") else context_length
    longest = min(most, context_length - len(start.token_ids))
    for index, choice in enumerate(start.choices):
        if not choice.finished and len(choice.token_ids) >= longest:
            text = f"choices[{index}] has {len(choice.token_ids)} tokens: nothing is left to do"
            raise invalid(f"choices[{index}].token_ids", text)
    return tuple(None if choice.finished else tuple(choice.token_ids) for choice in start.choices)


def request_from(
    start: decode_pb2.DecodeStart | prefill_pb2.PrefillStart,
    key: Hashable,
    n: int,
    delivered: tuple[tuple[int, ...] | None, ...],
    params: SamplingParams,
    now: float,
    most_seconds: float,
) -> EngineRequest:
    """A checked start as the engine takes it. `most_seconds`: the node's own limit."""
    spans = spans_from(start.images)
    seconds = start.timeout_ms / 1000 if start.HasField("timeout_ms") else most_seconds
    return EngineRequest(
        key=key,
        prompt=with_placeholders(start.token_ids[: len(start.token_ids) - start.delivered], spans),
        delivered=delivered,
        params=params,
        n=n,
        namespace=start.namespace,
        priority=start.priority,
        deadline=now + min(seconds, most_seconds),
        failed_steps=start.failed_steps,
        images=spans,
        image_source=source_from(start),
        suspect=isinstance(start, decode_pb2.DecodeStart) and start.suspect,
    )


def tiers_to(tiers: CachedTiers) -> common_pb2.CachedTiers | None:
    if not any(tiers):
        return None
    return common_pb2.CachedTiers(host_tokens=tiers.host, disk_tokens=tiers.disk, peer_tokens=tiers.peers)


def tiers_from(tiers: common_pb2.CachedTiers, most: int) -> CachedTiers:
    """Tiers of a prompt of `most` tokens."""
    found = tiers.host_tokens, tiers.disk_tokens, tiers.peer_tokens
    return CachedTiers(*(min(tokens, most) for tokens in found))


def name_from(message: common_pb2.Attempt) -> AttemptName:
    return AttemptName(message.gateway, message.request, message.attempt, message.decode_try)


def name_to(name: AttemptName) -> common_pb2.Attempt:
    return common_pb2.Attempt(**name._asdict())


def logprobs_to(logprobs: Logprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=logprobs.token, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )


def logprobs_from(message: common_pb2.PositionLogprobs) -> Logprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return Logprobs(message.chosen.token_id, message.chosen.logprob, top)


def prompt_logprobs_to(logprobs: Sequence[Logprobs] | None) -> list[common_pb2.PositionLogprobs]:
    """One entry a prompt token; nothing predicts the first. None: not requested."""
    if logprobs is None:
        return []
    return [common_pb2.PositionLogprobs(), *(logprobs_to(entry) for entry in logprobs)]


def prompt_logprobs_from(messages: Sequence[common_pb2.PositionLogprobs]) -> tuple[Logprobs, ...]:
    return tuple(logprobs_from(message) for message in messages[1:])


def status_of(
    code: str, reason: str, message: str, field: str | None = None, retry_after_ms: int | None = None
) -> status_pb2.Status:
    """A Status from code, reason and message of a core. message: follows the field's name if it begins with a
    colon."""
    named = message.startswith(":")
    wait = retry_after_ms
    return to_status(
        BatonError(grpc.StatusCode[code], reason, message, field=field, named=named, retry_after_ms=wait)
    )
