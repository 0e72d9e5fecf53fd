"""Between the hand-off's plain messages and those of Prefill.Run and Cache.Lend, as the caller sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from baton.engine.sampling_params import SamplingParams
from baton.handoff.messages import (
    AskCached,
    AttemptName,
    CancelPrefill,
    ChunkAnnounced,
    DraftsAnnounced,
    FirstSampled,
    GroupPages,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    ReleaseLease,
    StartPrefill,
)
from baton.rpc.errors import from_status
from baton.rpc.validate import check_token_ids
from baton.v1 import common_pb2, prefill_pb2
from baton.worker.convert import (
    grammar_to,
    logprobs_from,
    name_from,
    name_to,
    prompt_logprobs_from,
    tiers_from,
)
from baton.worker.hidden_states import HiddenForm
from baton.worker.images.spans import images_to, plain_tokens


def request_for(effect: object, ahead: bool) -> prefill_pb2.PrefillRequest:
    """StartPrefill, AskCached, CancelPrefill, ReleaseLease or Beat as a message. `ahead`: pulls can wait for
    a step."""
    if isinstance(effect, StartPrefill):
        return prefill_pb2.PrefillRequest(start=_start(effect, ahead))
    if isinstance(effect, AskCached):
        cached = prefill_pb2.CachedPrompt(
            attempt=name_to(effect.name),
            token_ids=plain_tokens(effect.token_ids, effect.images),
            namespace=effect.namespace,
            images=images_to(effect.images),
        )
        return prefill_pb2.PrefillRequest(cached=cached)
    if isinstance(effect, CancelPrefill):
        return prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel(attempt=name_to(effect.name)))
    if isinstance(effect, ReleaseLease):
        return prefill_pb2.PrefillRequest(release=prefill_pb2.LeaseRelease(attempt=name_to(effect.name)))
    return prefill_pb2.PrefillRequest(heartbeat=prefill_pb2.Heartbeat())


def several(requests: list[prefill_pb2.PrefillRequest]) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(several=prefill_pb2.PrefillRequests(requests=requests))


def _start(effect: StartPrefill, ahead: bool) -> prefill_pb2.PrefillStart:
    request = effect.request
    start = prefill_pb2.PrefillStart(
        attempt=name_to(effect.name),
        token_ids=plain_tokens(effect.token_ids, request.images),
        delivered=effect.delivered,
        sampling=sampling_to(effect.params),
        n=effect.n,
        priority=request.priority,
        namespace=request.namespace,
        announce_ahead=ahead,
        failed_steps=request.failed_steps,
        traceparent=request.trace,
        sources=[common_pb2.PromptSource(**asdict(source)) for source in effect.sources],
        images=images_to(request.images),
    )
    if request.image_source is not None:
        start.pictures = request.image_source.pictures
        start.encoders.extend(request.image_source.encoders)
    if effect.remaining != float("inf"):
        start.timeout_ms = max(1, int(effect.remaining * 1000))
    return start


def sampling_to(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every value is set: the prefill node adds nothing of its own, so stop tokens are complete already."""
    message = common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        # Refused beside a grammar; the model's own are among the stop tokens then as well.
        ignore_eos=params.grammar is None,
        grammar=grammar_to(params.grammar) if params.grammar is not None else None,
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    return message


Positions = list[common_pb2.PositionLogprobs]


def events_from(
    response: prefill_pb2.PrefillResponse,
    vocab_size: int,
    parts: dict[AttemptName, Positions],
    form: HiddenForm | None = None,
) -> Iterator[PrefillOutput]:
    """The events of a message; kinds of later versions of the contract are passed over.

    parts: log-probabilities of prompts that have come only in part; the caller keeps them between messages.
    form: of the hidden states that were asked for; None: none were.
    Raises BatonError for a token outside the vocabulary, which in a step would fail everybody's rows, and for
    hidden states of another form.
    """
    for event in response.events:
        name = name_from(event.attempt)
        kind = event.WhichOneof("kind")
        if kind == "chunk":
            chunk = event.chunk
            groups = tuple(map(_group, chunk.groups))
            yield ChunkAnnounced(name, groups, chunk.last, chunk.step, chunk.content)
        elif kind == "first":
            first = event.first
            check_token_ids([t.token_id for t in first.tokens], vocab_size, "first.tokens")
            tokens = tuple(
                (t.token_id, logprobs_from(t.logprobs) if t.HasField("logprobs") else None)
                for t in first.tokens
            )
            logprobs = prompt_logprobs_from([*parts.pop(name, ()), *first.prompt_logprobs])
            hidden = form.read(first.hidden) if form is not None and first.hidden else None
            tiers = tiers_from(first.cached_tiers, first.cached_tokens)
            yield FirstSampled(name, tokens, first.cached_tokens, logprobs, hidden, tiers)
        elif kind == "drafts":
            yield DraftsAnnounced(name, tuple(map(_group, event.drafts.groups)), event.drafts.entries)
        elif kind == "prompt_logprobs":
            parts.setdefault(name, []).extend(event.prompt_logprobs.positions)
        elif kind == "finished":
            yield LeaseFinished(name, event.finished.stood)
        elif kind == "failed":
            parts.pop(name, None)
            error = from_status(event.failed)
            yield PrefillFailed(name, error.code.name, error.reason, error.message)


def _group(message: prefill_pb2.GroupPages) -> GroupPages:
    return GroupPages(message.first_page, tuple(message.page_ids), tuple(message.generations))
