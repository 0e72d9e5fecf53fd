"""One request, from `start` to its terminal event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from baton.gateway import admission
from baton.gateway.attempts import Attempts, Wait
from baton.gateway.callers import Caller
from baton.gateway.choice_stream import ChoiceStream
from baton.gateway.messages import decode_start, finished
from baton.gateway.prompt import Prompt, encode_prompt
from baton.gateway.reader import SlowReader
from baton.gateway.router import Way
from baton.gateway.session import Session
from baton.gateway.timing import Timing
from baton.gateway.token_log import TokenLog
from baton.rpc.errors import BatonError, cancelled, deadline_exceeded, internal, to_status
from baton.rpc.logs import get_logger
from baton.rpc.validate import MAX_CHOICES, MAX_STOP_STRINGS
from baton.v1 import common_pb2, decode_pb2, inference_pb2

if TYPE_CHECKING:
    from baton.gateway.gateway import Gateway

_log = get_logger("baton.gateway")


class Request:
    """Runs on the event loop. Whatever happens, `log` gets exactly one terminal event, and what the request
    held at other nodes is let go at that moment (`_settle`).

    on_change: called when `log.take()` has something new; the client's writer takes it when it can.
    """

    def __init__(
        self,
        gateway: Gateway,
        start: inference_pb2.GenerateStart,
        on_change: Callable[[], None],
        caller: Caller,
    ) -> None:
        self.caller = caller
        self.number = gateway.next_number()
        self.log = TokenLog(
            start.id,
            n=min(start.n, MAX_CHOICES) if start.HasField("n") else 1,  # before it is checked
            stop=start.sampling.stop[:MAX_STOP_STRINGS],  # likewise
            min_tokens=start.sampling.min_tokens,
            include_token_ids=start.include_token_ids if start.HasField("include_token_ids") else True,
            await_prompt_logprobs=start.sampling.HasField("prompt_logprobs"),
        )
        self.name = f"{gateway.incarnation:016x}-{self.number}"
        self._gateway = gateway
        self._start = start
        self._session: Session | None = None
        self._on_change = on_change
        self._prompt: Prompt | None = None
        self._sampling = common_pb2.SamplingParams()
        self._fingerprint = ""
        self._attempts = Attempts(
            self.log, gateway.policy, resumable=start.resume if start.HasField("resume") else True
        )
        self._way: Way | None = None
        self._accepted = self._prompt_done = False
        self._streams: list[ChoiceStream] = []
        self._stats: decode_pb2.RequestStats | None = None
        limit = gateway.config.request_seconds
        self._timing = Timing(
            gateway.metrics, start.timeout_ms / 1000 if start.HasField("timeout_ms") else limit
        )
        config = gateway.config
        self._reader = SlowReader(
            config.max_unread_tokens, config.slow_reader_seconds, self._pause, self.fail
        )
        self._timer: asyncio.TimerHandle | None = None
        self._placing: asyncio.TimerHandle | None = None
        self._preparing: asyncio.Task[None] | None = None

    @property
    def attempt(self) -> int:
        return self._attempts.number

    def begin(self, session: Session | None = None) -> None:
        """Checks the request and starts it. A request that is refused ends here."""
        try:
            self._gateway.admit(self, self._start)
            if session is not None:
                session.begin(self._start.WhichOneof("prompt") == "chat", len(self.log.choices))
                self._session = session
        except BatonError as error:
            self.fail(error)
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timing.limit, self._expire)
        self._preparing = loop.create_task(self._prepare(), name=f"request {self.name}")

    def take(self) -> list[inference_pb2.GenerateResponse]:
        """For the client's writer: see TokenLog.take."""
        events = self.log.take()
        if self.log.terminal is None:
            self._reader.look(self.log.unread)
        return events

    def cancel(self, reason: str) -> None:
        """Ends the request with CANCELLED, unless it has ended. What it held is freed at once."""
        self.fail(cancelled(reason))

    def fail(self, error: BatonError) -> None:
        """Ends the request with the error, unless it has ended."""
        if self.log.fail(to_status(error)):
            outcome = "cancelled" if error.code is grpc.StatusCode.CANCELLED else "failed"
            self._settle(outcome, error)

    # Before the decode node.

    async def _prepare(self) -> None:
        try:
            self._prompt = await encode_prompt(
                self._start, self._session, self._gateway.tokenizer, self._timing.remaining
            )
            if self.log.terminal is not None:
                return
            model = self._gateway.model_or_last()
            if model is None:
                raise self._gateway.no_decode_node()
            self.caller.check_prompt(len(self._prompt.token_ids), self._prompt.field)
            self._sampling = admission.fit(
                self._start.sampling, len(self._prompt.token_ids), model.context_length, self._prompt.field
            )
            self._fingerprint = model.fingerprint
            self.log.prompt_ids = self._prompt.token_ids
            self._way = self._gateway.way(
                self.number, self._prompt.token_ids, self._start.namespace, self._session
            )
            self._open_streams()
            self._place()
        except BatonError as error:
            self.fail(error)
        except Exception as error:
            _log.exception("request failed", request=self.name)
            self.fail(internal(f"{type(error).__name__} while preparing the request"))

    def _open_streams(self) -> None:
        self._streams = [
            ChoiceStream(
                self._gateway.tokenizer,
                choice,
                self.log.prompt_ids,
                one_by_one=bool(self._start.sampling.stop),
                on_progress=self._on_progress,
                on_error=self.fail,
            )
            for choice in self.log.choices
        ]

    # At decode nodes.

    def _place(self) -> None:
        """Gives the request to a decode node, now or as soon as one takes it."""
        assert self._way is not None
        try:
            while True:
                candidates = self._gateway.nodes.candidates(self.number, self._fingerprint)
                place = self._attempts.place(candidates, time.monotonic(), self._way.pick_decode)
                if isinstance(place, Wait):
                    loop = asyncio.get_running_loop()
                    self._placing = loop.call_later(place.seconds, self._place)
                    return
                prefill = self._way.order_prefill(self._gateway.nodes.prefill)
                limit = self._way.decide(self._gateway.split, place, prefill, self._hand_off())
                if self._gateway.nodes.decode[place].send(self._decode_start(prefill, limit), self):
                    break
        except BatonError as error:
            self.fail(self._gateway.no_decode_node() if error.reason == "NO_DECODE_NODE" else error)
            return
        self._attempts.begin(place)
        self._way.sent(place, prefill)
        if self._reader.paused:
            self._pause(True)
        if not self._accepted:
            self._accepted = True
            self._accept()

    def _hand_off(self) -> bool | None:
        """The client's word in where the prompt is computed, if any."""
        return self._start.hand_off if self._start.HasField("hand_off") else None

    def _decode_start(self, prefill: Sequence[str], local_tokens: int | None) -> decode_pb2.DecodeStart:
        return decode_start(
            self.number,
            self._start,
            self.log.prompt_ids,
            self._sampling,
            self._attempts,
            prefill,
            self._timing.remaining,
            local_tokens,
        )

    def _accept(self) -> None:
        accepted = inference_pb2.Accepted(request_id=self.name, seed=self._sampling.seed)
        accepted.prompt_tokens = len(self.log.prompt_ids)
        self.log.accept(accepted)
        self._on_change()

    # From the decode node (TokenSink) and the detokenizer.

    def on_prompt(self, prompt: decode_pb2.PromptDone) -> None:
        first = not self._prompt_done
        self._prompt_done = True
        self._attempts.progress()
        if self._way is not None:
            self._way.computed()
        if not first:
            return  # computed again, for another attempt
        self.log.cached_tokens = prompt.cached_tokens
        if self._start.sampling.HasField("prompt_logprobs"):
            logprobs = list(prompt.prompt_logprobs)
            self._streams[0].fill_token_bytes(logprobs, lambda: self.log.set_prompt_logprobs(logprobs))

    def on_tokens(self, address: str, delta: decode_pb2.TokenDelta) -> None:
        if not self._attempts.current(address, delta.attempt):
            _log.warning("tokens of an attempt that is over", request=self.name, decode=address)
            return
        self._attempts.progress()
        self._timing.tokens(delta)
        known = delta.choice < len(self._streams)
        wrong = self._streams[delta.choice].wrong(delta, self._sampling) if known else "an unknown choice"
        if wrong:
            self.fail(internal(f"decode node {self._address()} sent {wrong}", "BAD_PEER"))
        elif not self.log.choices[delta.choice].finished:
            # After a stop string the node goes on with this choice until all of the request is cancelled.
            self._streams[delta.choice].push(delta.token_ids, delta.logprobs, delta.finish_reason)

    def on_finished(self, stats: decode_pb2.RequestStats) -> None:
        if not self.log.received_all:
            self.fail(internal(f"decode node {self._address()} finished before its last token", "BAD_PEER"))
            return
        self._stats = stats
        self._attempts.done = True
        if self._way is not None and not self._attempts.resumed:
            self._way.reckon(self._gateway.split, stats, self._timing.first_token)
        self._finish_if_complete()

    def on_failed(self, error: BatonError, lost: bool) -> None:
        address, resumed = self._address(), self._attempts.resumed
        try:
            self._attempts.ended(error, time.monotonic(), lost=lost)
        except BatonError as last:
            self.fail(last)
            return
        if self._attempts.done:
            self._finish_if_complete()
            return
        if self._attempts.resumed > resumed:
            self._gateway.metrics.resumes.inc()
        _log.info(
            "trying another decode node",
            request=self.name,
            decode=address,
            output_tokens=self.log.output_tokens,
            error=error.message,
        )
        self._place()

    def _pause(self, paused: bool) -> None:
        node = self._gateway.nodes.decode.get(self._attempts.address)
        if node is not None:
            node.pause(self.number, self.attempt, paused)

    def _on_progress(self, tokens: int) -> None:
        self._finish_if_complete()
        if self.log.terminal is None:
            self._reader.look(self.log.unread)
        self._on_change()

    def _finish_if_complete(self) -> None:
        """Ends the request well once all choices have finished and the decode node has nothing to add."""
        if not self.log.complete:
            return
        if not self._attempts.done and not any(choice.stop_matched for choice in self.log.choices):
            return
        stats = self._stats or decode_pb2.RequestStats()
        if self.log.finish(finished(self.log, stats, self._attempts, self._timing)):
            if self._way is not None and not self._attempts.resumed:
                predicted = self._way.predicted(stats, self._address())
                self._gateway.metrics.routed(predicted, self.log.cached_tokens)
            self._commit_session(stats.prefill_address)
            self._settle("finished", None)

    # The end.

    def _expire(self) -> None:
        self.fail(deadline_exceeded(f"the request did not finish within {self._timing.limit:g} s"))

    def _settle(self, outcome: str, error: BatonError | None) -> None:
        """Lets go of everything, at every node. Called once, with the terminal event."""
        if self._timer is not None:
            self._timer.cancel()
        if self._preparing is not None and self._preparing is not asyncio.current_task():
            self._preparing.cancel()
        self._reader.close()
        if self._placing is not None:
            self._placing.cancel()
        node = self._gateway.nodes.decode.get(self._attempts.address)
        if node is not None:
            node.cancel(self.number)
        if self._way is not None:
            self._way.ended()
        self._close_streams()
        if self._session is not None:
            self._session.end()
        self._gateway.forget(self, outcome)
        ending = {"reason": error.reason} if error is not None else {}
        _log.info(
            outcome,
            request=self.name,
            prompt_tokens=len(self.log.prompt_ids),
            output_tokens=self.log.output_tokens,
            resumed=self._attempts.resumed,
            seconds=round(self._timing.elapsed, 3),
            **ending,
        )
        self._on_change()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []
        self._gateway.tokenizer.flush()

    def _commit_session(self, prefill_address: str) -> None:
        session, prompt = self._session, self._prompt
        if session is None or prompt is None:
            return
        session.decode_address = self._address()
        session.prefill_address = prefill_address
        session.commit(prompt.token_ids, self.log.choices[0], prompt.conversation, prompt.rendered)

    def _address(self) -> str:
        return self._attempts.address
