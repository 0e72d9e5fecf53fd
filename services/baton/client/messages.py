"""Converts between the client's types and the messages of baton.v1.Inference; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from baton.client.chat import chat_prompt, tool_calls
from baton.client.grammars import format_message, grammar_message
from baton.client.types import (
    Arguments,
    Choice,
    Completion,
    Delta,
    Embeddings,
    EmbedOptions,
    FinishReason,
    Input,
    Model,
    Options,
    PositionLogprobs,
    Stats,
    TokenLogprob,
    Usage,
)
from baton.rpc.errors import BatonError, failed_precondition, from_status, internal, invalid
from baton.v1 import common_pb2, embed_pb2, inference_pb2, node_pb2

_PROMPT = Arguments.__annotations__.keys() - Options.__annotations__.keys()
_SAMPLING = {each.name for each in common_pb2.SamplingParams.DESCRIPTOR.fields}
_START = {"model", "n", "priority", "namespace", "resume", "hand_off"}
_FINISH: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_ENDED: dict[FinishReason | None, int] = {name: number for number, name in _FINISH.items()}
TIMEOUT_MARGIN_SECONDS = 5.0
"""Time for the gateway to report a timeout; then the client itself gives up."""


def make_start(
    id: str, prompt: str | None, options: Arguments, session: str = ""
) -> inference_pb2.GenerateRequest:
    """The first message of a request. Raises BatonError for what the contract cannot express."""
    start = inference_pb2.GenerateStart(id=id, session=session)
    messages, token_ids = options.get("messages"), options.get("token_ids")
    if sum(each is not None for each in (prompt, messages, token_ids)) != 1:
        raise invalid("prompt", "give one of prompt, messages and token_ids")
    for name, value in options.items():
        if name not in _PROMPT and value is not None:
            _set(start, name, value)
    if options.get("grammar") is not None and options.get("response_format") is not None:
        raise invalid("response_format", "give grammar or response_format, not both")
    try:
        chat = chat_prompt(options)
        if chat is not None:
            start.chat.CopyFrom(chat)
        elif prompt is not None:
            start.text = prompt
        else:
            start.tokens.CopyFrom(inference_pb2.TokenPrompt(token_ids=token_ids))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise invalid("prompt", f"the prompt cannot be sent: {error}") from error
    return inference_pb2.GenerateRequest(start=start)


def _set(start: inference_pb2.GenerateStart, name: str, value: object) -> None:
    try:
        if name == "timeout":
            start.timeout_ms = max(1, int(float(value) * 1000))  # type: ignore[arg-type]
        elif name in _START:
            setattr(start, name, value)
        elif name == "response_format":
            start.sampling.grammar.CopyFrom(format_message(value))  # type: ignore[arg-type]
        elif name not in _SAMPLING:
            raise invalid(name, f"unknown option {name!r}")
        elif name == "stop":
            start.sampling.stop.extend([value] if isinstance(value, str) else value)  # type: ignore[arg-type]
        elif name == "stop_token_ids":
            start.sampling.stop_token_ids.extend(value)  # type: ignore[arg-type]
        elif name == "logit_bias":
            start.sampling.logit_bias.update(value)  # type: ignore[call-overload]
        elif name == "grammar":
            start.sampling.grammar.CopyFrom(grammar_message(value))  # type: ignore[arg-type]
        else:
            setattr(start.sampling, name, value)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise invalid(name, f"{name}={value!r} cannot be sent: {error}") from error


_POOLING = {"last": embed_pb2.POOLING_LAST, "mean": embed_pb2.POOLING_MEAN}


def make_embed(inputs: Sequence[Input], options: EmbedOptions) -> inference_pb2.EmbedRequest:
    """Raises BatonError for what the contract cannot express."""
    request = inference_pb2.EmbedRequest()
    if isinstance(inputs, str):
        raise invalid("inputs", "give a list of inputs, not a text")
    for index, each in enumerate(inputs):
        try:
            if isinstance(each, str):
                request.inputs.add(text=each)
            else:
                request.inputs.add(tokens=inference_pb2.TokenPrompt(token_ids=each))
        except (TypeError, ValueError) as error:
            raise invalid(f"inputs[{index}]", f"inputs[{index}] cannot be sent: {error}") from error
    for name, value in options.items():
        try:
            if name == "timeout":
                request.timeout_ms = max(1, int(float(value) * 1000))  # type: ignore[arg-type]
            elif name == "pooling":
                request.pooling = _POOLING[value]  # type: ignore[index]
            elif name in EmbedOptions.__annotations__:
                setattr(request, name, value)
            else:
                raise invalid(name, f"unknown option {name!r}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise invalid(name, f"{name}={value!r} cannot be sent: {error}") from error
    return request


def embeddings(answer: inference_pb2.EmbedResponse) -> Embeddings:
    return Embeddings(
        vectors=[list(each.values) for each in answer.embeddings],
        prompt_tokens=sum(each.prompt_tokens for each in answer.embeddings),
        cached_tokens=sum(each.cached_tokens for each in answer.embeddings),
    )


def make_cancel(id: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(cancel=inference_pb2.GenerateCancel(id=id))


def call_timeout(options: Options | EmbedOptions) -> float | None:
    timeout = options.get("timeout")
    return timeout + TIMEOUT_MARGIN_SECONDS if timeout is not None else None


class Collector:
    """Puts the events of one request together.

    id: the request's. message: which of the client's messages on its stream started it, counted from 0.
    """

    def __init__(self, id: str, options: Arguments, message: int = 0) -> None:
        self.id = id
        self.message = message
        self.completion = Completion(
            choices=[Choice() for _ in range(options.get("n") or 1)],
            response_format=options.get("response_format"),
        )
        self._tools = options.get("tools") or ()
        self.ended = False
        self.ticket = ""
        """With which another gateway goes on; empty: none can."""

    def add(self, event: inference_pb2.GenerateResponse) -> Delta | None:
        """Takes an event; returns the new output, if it is that. Raises BatonError if the request failed.

        Events of other requests, such as an earlier turn that was cancelled, are passed over.
        """
        kind = event.WhichOneof("kind")
        if kind == "rejected" and event.rejected.message == self.message:
            self.ended = True
            raise from_status(event.rejected.status)
        if event.id != self.id:
            return None
        if kind == "accepted":
            self.completion.request_id = event.accepted.request_id
            self.completion.seed = event.accepted.seed
            self.ticket = event.accepted.resume_ticket
        elif kind == "delta":
            return self._add_delta(event.delta)
        elif kind == "finished":
            self.ended = True
            usage = event.finished.usage
            self.completion.usage = Usage(
                usage.prompt_tokens,
                usage.output_tokens,
                usage.cached_tokens,
                usage.reasoning_tokens,
                usage.drafted_tokens,
                usage.accepted_drafts,
                usage.cached_tiers.host_tokens,
                usage.cached_tiers.disk_tokens,
                usage.cached_tiers.peer_tokens,
            )
            self.completion.stats = _stats(event.finished)
        elif kind == "failed":
            self.ended = True
            raise from_status(event.failed)
        return None

    @property
    def has_output(self) -> bool:
        return any(choice != Choice() for choice in self.completion.choices)

    def resume(self, start: inference_pb2.GenerateStart) -> inference_pb2.GenerateRequest:
        """Asks another gateway for what is still to come. start: the request, as it was sent."""
        message = inference_pb2.GenerateRequest()
        resume = message.resume
        resume.start.CopyFrom(start)
        resume.ticket = self.ticket
        resume.prompt_logprobs = len(self.completion.prompt_logprobs)
        for choice in self.completion.choices:
            resume.choices.add(
                token_ids=choice.token_ids,
                text_characters=len(choice.text),
                reasoning_characters=len(choice.reasoning),
                tool_calls=len(choice.tool_calls),
                finish_reason=_ENDED.get(choice.finish_reason),
            )
        return message

    def check_over(self) -> None:
        """Before the next turn on the same stream, which would pass over the events of this one. Raises
        BatonError."""
        if not self.ended:
            text = "the session's earlier turn has not been read to its end: read it, or close it"
            raise failed_precondition(text, "SESSION_BUSY")

    def lost(self) -> BatonError:
        """The error if the stream ends before the request."""
        self.ended = True
        return internal("the stream ended before the request's terminal event", "STREAM_ENDED")

    def _add_delta(self, message: inference_pb2.Delta) -> Delta:
        delta = Delta(
            choice=message.choice,
            text=message.text,
            token_ids=list(message.token_ids),
            logprobs=_positions(message.logprobs),
            finish_reason=_FINISH.get(message.finish_reason),
            stop_matched=message.stop_matched,
            reasoning=message.reasoning,
            tool_calls=tool_calls(message.tool_calls, self._tools),
        )
        self.completion.prompt_logprobs.extend(_positions(message.prompt_logprobs))
        choice = self.completion.choices[delta.choice]
        choice.text += delta.text
        choice.reasoning += delta.reasoning
        choice.tool_calls += delta.tool_calls
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.stop_matched = delta.stop_matched or choice.stop_matched
        return delta


def model(info: node_pb2.ModelInfo) -> Model:
    return Model(**{field.name: getattr(info, field.name) for field in fields(Model)})


def _stats(finished: inference_pb2.Finished) -> Stats:
    stats = finished.stats
    return Stats(
        ttft=finished.ttft_us / 1e6,
        total=finished.total_us / 1e6,
        decode_address=finished.decode_address,
        prefill_address=stats.prefill_address,
        transport=stats.transport,
        pulled_pages=stats.pulled_pages,
        pulled_bytes=stats.pulled_bytes,
        retractions=stats.retractions,
        handoff_retries=stats.handoff_retries,
        resumed=finished.resumed,
    )


def _positions(positions: Iterable[common_pb2.PositionLogprobs]) -> list[PositionLogprobs]:
    return [
        PositionLogprobs(
            chosen=_token(each.chosen) if each.HasField("chosen") else None,
            top=[_token(top) for top in each.top],
        )
        for each in positions
    ]


def _token(entry: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.token_bytes)
