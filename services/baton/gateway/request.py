"""One request, from `start` to its terminal event."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from baton.authentication.api_keys import ApiKey
from baton.gateway.backpressure import SlowReader
from baton.gateway.decode_client import DecodeClient
from baton.gateway.metrics import RequestTimer
from baton.gateway.pictures import PictureLease
from baton.gateway.preparation import prepare
from baton.gateway.prompts import EncodedPrompt, GatewaySession
from baton.gateway.request_end import ended_request, finished_event
from baton.gateway.request_trace import RequestTrace
from baton.gateway.resume import ResumeAttempts, Wait
from baton.gateway.resumption import Resumption
from baton.gateway.routing import RequestRouting
from baton.gateway.runtime import Cancellable
from baton.gateway.shell import GatewayShell
from baton.gateway.token_log import fill_token_bytes, new_log
from baton.rpc.errors import BatonError, cancelled, deadline_exceeded, internal, to_status, without_frames
from baton.tokenizer.vocabulary import Vocabulary
from baton.tracing.recorder import EventKind
from baton.v1 import decode_pb2, inference_pb2, trace_pb2

MOST_ENCODERS = 16
"""Encode nodes that workers are told of."""


class GatewayRequest:
    """Pure: `gateway` has the clock, timers and connections. In every case `log` gets exactly one terminal
    event, and at that moment the request releases what it holds at other nodes (`_release`).

    on_change: called when `log.take()` has something new; the client's writer takes it when it can.
    """

    def __init__(
        self,
        gateway: GatewayShell,
        start: inference_pb2.GenerateStart,
        on_change: Callable[[], None],
        api_key: ApiKey,
        api: str = "grpc",
        traceparent: str = "",
        resume: inference_pb2.GenerateResume | None = None,
    ) -> None:
        """api: that the request came by, for the record. traceparent: the client's trace context; empty: it
        has none. resume: with which the client goes on; None: the request begins here."""
        self.api_key = api_key
        self._api = api
        self.number = gateway.next_number()
        self.log = new_log(start)
        self.name = f"{gateway.incarnation:016x}-{self.number}"
        self._gateway = gateway
        self._start: inference_pb2.GenerateStart | None = start
        """None once the prompt is encoded or refused: it may be large, and the client slow."""
        self._template = decode_pb2.DecodeStart(request=self.number, announce_admission=api == "http")
        """What all attempts have in common, but for the prompt. It holds copies: any part of a message keeps
        the whole message alive."""
        self._hand_off: bool | None = None
        """The client's choice where the prompt is computed; None: --split decides."""
        self._session: GatewaySession | None = None
        self._on_change = on_change
        self.prompt: EncodedPrompt | None = None
        self._pictures = PictureLease(gateway.pictures, api_key.owner, start.namespace)
        self.attempts = ResumeAttempts(
            self.log, gateway.policy, resumable=start.resume if start.HasField("resume") else True
        )
        self.resumption = Resumption(gateway, api_key, self.number, resume)
        self._routing: RequestRouting | None = None
        self._fingerprint = ""
        """Fingerprint of the model that the prompt was encoded for."""
        self.admitted = False
        """A decode node has said so. Only of requests that come by HTTP."""
        self._accepted = self._prompt_done = False
        self._vocabulary: Vocabulary | None = None
        self._max_tokens = self._vocabulary_size = 0
        self._with_logprobs = False
        self._grammar_field = ""
        """What the client has given that the grammar comes from."""
        self._stats: decode_pb2.RequestStats | None = None
        config = gateway.config
        limit = start.timeout_ms / 1000 if start.HasField("timeout_ms") else config.request_seconds
        self._timing = RequestTimer(gateway.metrics, limit, gateway.clock)
        self._trace = RequestTrace(gateway, self.number, start, traceparent)
        self._template.traceparent = self._trace.context
        self._trace.add(EventKind.RECEIVED, text=api)
        self._reader = SlowReader(
            config.max_unread_tokens, config.slow_reader_seconds, gateway.after, self._pause, self.fail
        )
        self._timer: Cancellable | None = None
        self._retry_timer: Cancellable | None = None
        self._preparing: Cancellable | None = None
        """None also once the prompt is encoded or refused."""

    @property
    def attempt(self) -> int:
        return self.attempts.number

    @property
    def seconds_left(self) -> float:
        """What is left of the request's time, which runs from when it came."""
        return self._timing.limit - self._timing.elapsed

    def begin(self, session: GatewaySession | None = None) -> None:
        """Checks the request and starts it. A request that is refused ends here."""
        start = self._start
        assert start is not None, "begun twice"
        try:
            self._timing.limit = min(self._timing.limit, self.resumption.open(start))
            self.attempts.resumed = self.resumption.resumed
            self._gateway.admit(self, start)
            self._template.n = len(self.log.choices)
            self._template.namespace = start.namespace
            if start.HasField("priority"):
                self._template.priority = start.priority
            if start.HasField("hand_off"):
                self._hand_off = start.hand_off
            if session is not None:
                session.begin(start.WhichOneof("prompt") == "chat", len(self.log.choices))
                self._session = session
        except BatonError as error:
            self.fail(error)
            return
        self._timer = self._gateway.after(self._timing.limit, self._expire)
        self._preparing = self._gateway.spawn(self._prepare(start), f"request {self.name}")

    def take(self) -> list[inference_pb2.GenerateResponse]:
        """Called by the client's writer: see TokenLog.take."""
        events = self.resumption.unseen(self.log.take())
        if self._reader.paused:
            self._reader.look(self.log.unread)
        if events:
            self._trace.written()
        return events

    def cancel(self, reason: str) -> None:
        """Ends the request with CANCELLED, unless it has ended. Frees what it held at once."""
        self.fail(cancelled(reason))

    def fail(self, error: BatonError) -> None:
        """Ends the request with the error, unless it has ended."""
        without_frames(error)
        if self.log.fail(to_status(error)):
            outcome = "cancelled" if error.code is grpc.StatusCode.CANCELLED else "failed"
            self._release(outcome, error)

    async def _prepare(self, start: inference_pb2.GenerateStart) -> None:
        try:
            prepared = await prepare(
                self._gateway,
                start,
                self._session,
                self.api_key,
                self._timing,
                trace_pb2.RequestName(gateway=self._gateway.incarnation, request=self.number),
                self._template.traceparent,
                self._tokenizing,
                self._tokenized,
                self._pictures,
            )
            self._start = self._preparing = None
            if self.log.terminal is not None:
                return
            self.prompt, outputs, sampling = prepared.prompt, prepared.outputs, prepared.sampling
            vocabulary = self._vocabulary = prepared.vocabulary
            self._fingerprint, self._grammar_field = prepared.fingerprint, prepared.grammar_field
            prepared.fill(self._template)
            # Read once: they are asked for at every token.
            self._max_tokens, self._vocabulary_size = sampling.max_tokens, vocabulary.size
            self._with_logprobs = sampling.HasField("logprobs")
            self.log.begin(vocabulary, self.prompt.token_ids, outputs, self.resumption.first)
            self.log.image_tokens = self.prompt.image_tokens
            self._routing = self._gateway.routing(self._template, self.prompt.keys, self._session)
            await self.resumption.prepared(start, prepared, self.log, self.seconds_left)
            if self.log.terminal is not None:
                return
            if self.log.complete:
                self._accept()
                self.attempts.done = True
                self._finish_if_complete()
                return
            self._choose_decode()
        except Exception as error:
            self._preparing = None
            if not isinstance(error, BatonError):
                self._gateway.log.exception("request failed", request=self.name)
                error = internal(f"{type(error).__name__} while preparing the request")
            self.fail(error)

    def _tokenizing(self, address: str) -> None:
        self._timing.begin_phase("tokenize")
        self._trace.add(EventKind.TOKENIZING, text=address)

    def _tokenized(self, count: int) -> None:
        self._timing.begin_phase("route")
        self._trace.add(EventKind.TOKENIZED, number=count)

    def _choose_decode(self) -> None:
        """Sends the next attempt now, or as soon as a node can take it. `attempts` and the routing decide."""
        routing, nodes = self._routing, self._gateway.nodes
        if self.log.terminal is not None or routing is None:
            return
        try:
            while True:
                candidates = nodes.candidates(self.number, self._fingerprint)
                decode = self.attempts.choose(candidates, self._gateway.clock(), routing.pick_decode)
                if isinstance(decode, Wait):
                    self._retry_timer = self._gateway.after(decode.seconds, self._choose_decode)
                    return
                prefill = routing.order_prefill(nodes.prefill)
                limit = routing.decide(self._gateway.split, decode, prefill, self._hand_off)
                start = self._decode_start(prefill, limit)
                start.sources.extend(routing.sources(decode, prefill))
                if nodes.decode[decode].send(start, self):
                    break
        except BatonError as error:
            self.fail(self._gateway.no_decode_node() if error.reason == "NO_DECODE_NODE" else error)
            return
        self.attempts.begin(decode)
        self._timing.begin_phase("")
        self._trace.add(EventKind.SENT, attempt=self.attempts.number, text=decode)
        routing.sent(decode, prefill)
        if self._reader.paused:
            self._pause(True)
        if not self._accepted:
            self._accepted = True
            self._accept()

    def _accept(self) -> None:
        accepted = inference_pb2.Accepted(request_id=self.name, seed=self._template.sampling.seed)
        accepted.prompt_tokens, accepted.max_tokens = len(self.log.prompt_ids), self._max_tokens
        accepted.resume_ticket = self.resumption.ticket()
        self.log.accept(accepted)
        self._on_change()

    def _decode_start(self, prefill: Sequence[str], local_tokens: int | None) -> decode_pb2.DecodeStart:
        """The next attempt, with the output that earlier ones delivered. prefill: nodes in the order to try.
        local_tokens: limit of tokens that the decode node computes itself."""
        message = decode_pb2.DecodeStart(
            token_ids=self.log.prompt_ids,
            timeout_ms=max(1, int(self._timing.remaining * 1000)),
            prefill=prefill,
            local_prefill_tokens=local_tokens,
        )
        message.MergeFrom(self._template)
        if message.images:
            message.encoders.extend(self._gateway.nodes.encode[:MOST_ENCODERS])
        message.keep_log = self.resumption.keeps_log
        self.attempts.fill(message)
        return message

    @property
    def _node(self) -> DecodeClient | None:
        """Where the attempt runs."""
        return self._gateway.nodes.decode.get(self.attempts.address)

    def _pause(self, paused: bool) -> None:
        """The client does not read, or reads again."""
        if (node := self._node) is not None:
            node.pause(self.number, self.attempts.number, paused)

    def on_admitted(self) -> None:
        self.admitted, self._template.announce_admission = True, False
        self._on_change()

    def on_prompt(self, prompt: decode_pb2.PromptDone) -> None:
        self.attempts.progress()
        if self._routing is not None:
            self._routing.computed()
        if self._prompt_done:
            return  # computed again, for another attempt
        self._prompt_done, self.log.cached_tokens = True, prompt.cached_tokens
        if self._template.sampling.HasField("prompt_logprobs"):
            assert self._vocabulary is not None
            logprobs = list(prompt.prompt_logprobs)
            fill_token_bytes(logprobs, self._vocabulary)
            self.log.set_prompt_logprobs(logprobs)

    def on_tokens(self, address: str, delta: decode_pb2.TokenDelta) -> None:
        if not self.attempts.current(address, delta.attempt):
            self._gateway.log.warning("tokens of an attempt that is over", request=self.name, decode=address)
            return
        self.attempts.progress()
        number, token_ids = delta.choice, delta.token_ids[:]
        logprobs = delta.logprobs[:] if self._with_logprobs else ()
        self._trace.begun(delta.attempt)
        entries = len(logprobs) if self._with_logprobs else None
        if wrong := self.log.wrong(number, token_ids, self._max_tokens, self._vocabulary_size, entries):
            self.fail(internal(f"decode node {address} sent {wrong}", "BAD_PEER"))
            return
        choice = self.log.choices[number]
        before = len(choice.token_ids)
        try:
            choice.push(token_ids, logprobs, delta.finish_reason)
        except Exception as error:  # must not reach the connection, which other requests share
            self._gateway.log.exception("request failed", request=self.name)
            self.fail(internal(f"{type(error).__name__} while reading the output"))
            return
        taken = len(choice.token_ids) - before  # none after a stop string
        self._timing.tokens(number, taken)
        self._trace.tokens(taken, self.log)
        self._finish_if_complete()
        if self.log.terminal is None:
            self._reader.look(self.log.unread)
        self._on_change()

    def on_finished(self, stats: decode_pb2.RequestStats) -> None:
        if not self.log.complete:
            text = f"decode node {self.attempts.address} finished before its last token"
            self.fail(internal(text, "BAD_PEER"))
            return
        self._stats = stats
        self.attempts.done = True
        if self._routing is not None and not self.attempts.resumed:
            self._routing.learn(self._gateway.split, stats, self._timing.first_token)
        self._finish_if_complete()

    def on_failed(self, error: BatonError, lost: bool) -> None:
        resumed, address, attempt = self.attempts.resumed, self.attempts.address, self.attempts.number
        try:
            self.attempts.ended(error, self._gateway.clock(), lost=lost)
        except BatonError as last:
            if last.field == "sampling.grammar":
                last.field = self._grammar_field
            self.fail(last)
            return
        if self.attempts.resumed > resumed:
            self._gateway.metrics.resumes.inc()
        if self.attempts.done:
            self._finish_if_complete()
        else:
            kind = EventKind.RESUMED if self.attempts.resumed > resumed else EventKind.RETRIED
            self._trace.add(kind, attempt=attempt, text=error.reason)
            self._gateway.log.info(
                "trying another decode node", request=self.name, decode=address, error=error.message
            )
            self._choose_decode()

    def _finish_if_complete(self) -> None:
        """Finishes the request once all choices have finished and the decode node sends nothing more."""
        if not self.log.complete:
            return
        if not self.attempts.done and not any(choice.ended_early for choice in self.log.choices):
            return
        stats = self._stats or decode_pb2.RequestStats()
        if self.log.finish(finished_event(self.log, stats, self.attempts, self._timing)):
            if self._routing is not None and not self.attempts.resumed:
                predicted = self._routing.predicted(stats, self.attempts.address)
                self._gateway.metrics.routed(predicted, self.log.cached_tokens)
            self._commit_session(stats.prefill_address)
            self._release("finished", None)

    def _expire(self) -> None:
        self.fail(deadline_exceeded(f"the request did not finish within {self._timing.limit:g} s"))

    def _release(self, outcome: str, error: BatonError | None) -> None:
        """Releases everything at every node, and all references that lead back here, so that the request
        and its prompt are freed with the last reference. Called once, with the terminal event."""
        for each in (self._timer, self._retry_timer, self._preparing):
            if each is not None:
                each.cancel()
        self._timer = self._retry_timer = self._preparing = None
        self._reader.end()
        self._pictures.release()
        self._start = None
        if (node := self._node) is not None:
            node.cancel(self.number)
        if self._routing is not None:
            self._routing.ended()
        if self._session is not None:
            self._session.end()
        self._timing.ended(outcome, error)
        if error is not None and outcome == "failed":
            self._gateway.metrics.failed(error.reason)
        reason = error.reason if error is not None and outcome == "failed" else outcome
        self._trace.ended(self.log, reason)
        ended = ended_request(
            self.log,
            self._stats,
            self.attempts,
            self._timing,
            request=self.name,
            api=self._api,
            key=self.api_key.name,
            model=self._gateway.model_name,
        )
        self._gateway.ended(self, outcome, ended, error)
        on_change, self._on_change = self._on_change, lambda: None
        on_change()

    def _commit_session(self, prefill_address: str) -> None:
        session, prompt = self._session, self.prompt
        if session is not None and prompt is not None:
            session.decode_address, session.prefill_address = self.attempts.address, prefill_address
            session.commit(prompt, self.log.choices[0])
