"""A request's resume ticket and, of one that another gateway had begun, what its client has of the output."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import grpc
import msgspec

from baton.authentication.api_keys import ApiKey
from baton.authentication.resume_ticket import ResumeTicket
from baton.gateway.preparation import Prepared
from baton.gateway.shell import GatewayShell
from baton.gateway.token_log import ChoiceLog, TokenLog
from baton.rpc.errors import BatonError, failed_precondition, internal, invalid
from baton.rpc.validate import check_enums, check_token_ids
from baton.v1 import common_pb2, decode_pb2, inference_pb2


@dataclass(slots=True)
class Unseen:
    """What is still to be left out of a choice's deltas, because its client has it."""

    ended: bool
    tokens: int
    logprobs: int
    text: int
    reasoning: int
    calls: int

    @classmethod
    def of(cls, had: inference_pb2.ReceivedChoice) -> Unseen:
        return cls(
            bool(had.finish_reason),
            len(had.token_ids),
            had.logprobs,
            had.text_characters,
            had.reasoning_characters,
            had.tool_calls,
        )

    def split(self, delta: inference_pb2.Delta) -> inference_pb2.Delta:
        """Takes out of the delta what the client has, and returns it."""
        seen = inference_pb2.Delta(choice=delta.choice)
        if self.ended:
            seen.CopyFrom(delta)
            delta.Clear()
            return seen
        self.tokens -= _move(delta.token_ids, seen.token_ids, self.tokens)
        self.logprobs -= _move(delta.logprobs, seen.logprobs, self.logprobs)
        self.calls -= _move(delta.tool_calls, seen.tool_calls, self.calls)
        seen.text, seen.reasoning = delta.text[: self.text], delta.reasoning[: self.reasoning]
        delta.text, delta.reasoning = delta.text[len(seen.text) :], delta.reasoning[len(seen.reasoning) :]
        self.text, self.reasoning = self.text - len(seen.text), self.reasoning - len(seen.reasoning)
        return seen


class Resumption:
    """Every request has one. Only of a resumed request it does more than to give out tickets.

    Called in this order: `open`, `prepared`, then `ticket` and `unseen`.
    """

    def __init__(
        self,
        gateway: GatewayShell,
        api_key: ApiKey,
        number: int,
        resume: inference_pb2.GenerateResume | None,
    ) -> None:
        """number: the request's. resume: None: the request begins here."""
        self._seal = gateway.seal
        self._take_log = gateway.take_log
        self._name = (gateway.incarnation, number)
        self._api_key = api_key
        self._resume = resume
        self._earlier = self._name
        """What the request was called before."""
        self.first = f"{gateway.incarnation:016x}-{number}"
        """What it was called first."""
        self.replay = False
        """The client's writer leaves out by itself what the client has."""
        self.keep_log = False
        """Decode nodes keep the output, if there is a ticket, since the client does not get token ids."""
        self._ticket: ResumeTicket | None = None
        self._choices: list[Unseen] = []
        self._prompt_logprobs = 0

    @property
    def resumed(self) -> int:
        """How often other gateways, or this one, took the request over."""
        return self._ticket.resumed if self._ticket is not None else 0

    def open(self, start: inference_pb2.GenerateStart) -> float:
        """Gives a resumed request its seed. Returns the seconds that it has left; inf: it begins here. Raises
        BatonError for a ticket that cannot be used."""
        resume = self._resume
        if resume is None:
            return math.inf
        if self._seal is None:
            text = "resuming needs --cluster-secret-file, the same at all gateways"
            raise failed_precondition(text, "NO_TICKETS")
        if start.session:
            raise invalid(
                "resume.start.session", "a session's turn cannot be resumed: begin the session again"
            )
        if start.HasField("resume") and not start.resume:
            raise invalid("resume.start.resume", "is false, and the request is one to resume: leave it out")
        check_enums(resume)
        ticket = self._seal.open(resume.ticket, self._api_key)
        self._earlier, self.first = ticket.name, ticket.first
        self._ticket = msgspec.structs.replace(ticket, resumed=ticket.resumed + 1, name=self._name)
        if not start.sampling.HasField("seed"):
            start.sampling.seed = ticket.seed
        return ticket.expires - self._seal.now()

    async def prepared(
        self, start: inference_pb2.GenerateStart, prepared: Prepared, log: TokenLog, seconds: float
    ) -> None:
        """Makes the ticket of a request that begins here; puts the client's output into the log of a resumed
        one. seconds: that the request has left. Raises BatonError."""
        if self._seal is None or start.session or (start.HasField("resume") and not start.resume):
            return
        digest, ticket, resume = request_digest(start, prepared), self._ticket, self._resume
        if ticket is None or resume is None:
            self._ticket = ResumeTicket(
                digest,
                prepared.sampling.seed,
                prepared.fingerprint,
                self._api_key.identity,
                self._seal.now() + seconds,
                self._name,
                self.first,
                0,
            )
            return
        self._resume = None
        if ticket.fingerprint != prepared.fingerprint:
            text = "the request was begun with another model than the one that is served: begin another one"
            raise failed_precondition(text, "TICKET_OF_OTHER_MODEL")
        if ticket.digest != digest:
            text = "the ticket belongs to another prompt or other parameters: send the request as it was"
            raise invalid("resume.start", text, "TICKET_OF_OTHER_REQUEST")
        known = None
        if start.HasField("include_token_ids") and not start.include_token_ids:
            known = await self._take_log(self._earlier)
        self._restore(resume, known, prepared, log)

    def _restore(
        self,
        resume: inference_pb2.GenerateResume,
        known: decode_pb2.DecodeLog | None,
        prepared: Prepared,
        log: TokenLog,
    ) -> None:
        """known: what a decode node has kept."""
        if len(resume.choices) > len(log.choices):
            text = f"{len(resume.choices)} choices of a request with {len(log.choices)}"
            raise invalid("resume.choices", text)
        with_logprobs = prepared.sampling.HasField("logprobs")
        for index, choice in enumerate(log.choices):
            had = inference_pb2.ReceivedChoice()
            if index < len(resume.choices):
                had = resume.choices[index]
            field, count = f"resume.choices[{index}]", len(had.token_ids)
            if not had.HasField("logprobs"):
                had.logprobs = count * with_logprobs
            received = had.text_characters or had.reasoning_characters or had.tool_calls or had.finish_reason
            if known is not None:
                _push_known(known, index, log, had.logprobs, prepared)
            elif not count and received:
                raise lost()
            else:
                check_token_ids(had.token_ids, prepared.vocabulary.size, f"{field}.token_ids")
                if count + (not had.finish_reason) > prepared.sampling.max_tokens:
                    text = (
                        f"{field} has {count} tokens, and is not to have more than max_tokens: none is left"
                    )
                    raise invalid(f"{field}.token_ids", text)
                _push(had, choice, with_logprobs)
            self._choices.append(Unseen.of(had))
        self._prompt_logprobs = resume.prompt_logprobs
        if log.has_output:
            log.set_prompt_logprobs(())  # they come before all output

    @property
    def keeps_log(self) -> bool:
        return self.keep_log and self._ticket is not None

    def ticket(self) -> str:
        """The sealed ticket; empty: the request cannot be resumed."""
        return self._seal.seal(self._ticket) if self._seal is not None and self._ticket is not None else ""

    def unseen(self, events: list[inference_pb2.GenerateResponse]) -> list[inference_pb2.GenerateResponse]:
        """The events without what the client has."""
        if self.replay or not (self._choices or self._prompt_logprobs):
            return events
        return list(self._cut(events))

    def _cut(
        self, events: Iterable[inference_pb2.GenerateResponse]
    ) -> Iterator[inference_pb2.GenerateResponse]:
        for event in events:
            delta = event.delta
            if event.WhichOneof("kind") == "delta":
                had = min(self._prompt_logprobs, len(delta.prompt_logprobs))
                self._prompt_logprobs -= had
                del delta.prompt_logprobs[:had]
                if delta.choice < len(self._choices):
                    self._choices[delta.choice].split(delta)
                    if not says_something(delta):
                        continue
            yield event


def says_something(output: inference_pb2.Delta | inference_pb2.ReceivedChoice) -> bool:
    """Apart from which choice it belongs to."""
    return any(field.name != "choice" and value for field, value in output.ListFields())


def _move(entries: Any, into: Any, most: int) -> int:
    """Moves the first entries of a repeated field, `most` of them; returns how many there were."""
    count = min(most, len(entries))
    if count:
        into.extend(entries[:count])
        del entries[:count]
    return count


def _push(had: inference_pb2.ReceivedChoice, choice: ChoiceLog, with_logprobs: bool) -> None:
    """Makes the choice's text and state again. The client's log-probabilities are not known, and not sent."""
    if had.token_ids:
        nothing = [common_pb2.PositionLogprobs()] * len(had.token_ids) if with_logprobs else ()
        choice.push(had.token_ids, nothing, common_pb2.FINISH_REASON_UNSPECIFIED)
    if had.finish_reason and not choice.finish_reason:
        called = had.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
        choice.finish_reason = common_pb2.FINISH_REASON_STOP if called else had.finish_reason


def _push_known(
    known: decode_pb2.DecodeLog, index: int, log: TokenLog, logprobs: int, prepared: Prepared
) -> None:
    """logprobs: how many the client has. Raises BatonError if the others are not known."""
    if len(known.choices) != len(log.choices):
        raise lost()
    logged, sampling = known.choices[index], prepared.sampling
    if wrong := log.wrong(index, logged.token_ids, sampling.max_tokens, prepared.vocabulary.size):
        raise internal(f"a decode node has kept {wrong}", "BAD_PEER")
    entries = list(logged.logprobs)
    if sampling.HasField("logprobs"):
        unknown = len(logged.token_ids) - len(entries)  # of earlier attempts
        if logprobs < unknown:
            raise lost()
        entries = [common_pb2.PositionLogprobs() for _ in range(unknown)] + entries
    if logged.token_ids or logged.finish_reason:
        log.choices[index].push(logged.token_ids, entries, logged.finish_reason)


def lost() -> BatonError:
    text = "the tokens that the client has are not known any more, and are not computed again: ask anew"
    return BatonError(grpc.StatusCode.DATA_LOSS, "RESUME_LOST", text)


def request_digest(start: inference_pb2.GenerateStart, prepared: Prepared) -> bytes:
    """Digest of all that the tokens and the text of a request's output depend on. Tokens, not texts: a chat
    template may render a date."""
    about = inference_pb2.GenerateStart(
        n=start.n, namespace=start.namespace, raw_output=start.raw_output, sampling=prepared.sampling
    )
    about.sampling.stop.extend(start.sampling.stop)
    found = sha256(array("Q", prepared.prompt.token_ids).tobytes())
    found.update(about.SerializeToString(deterministic=True))
    for image in prepared.prompt.images:
        found.update(image.SerializeToString(deterministic=True))
    return found.digest()
