"""Decides at which decode node a request runs, and what happens when that node is lost. Pure, the clock
passed in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import grpc

from baton.gateway.token_log import TokenLog
from baton.rpc.errors import BatonError, internal, unavailable
from baton.v1 import decode_pb2

BACKOFF_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.0)
"""Seconds before a node is tried again after its failures one after the other, the last for all further
ones."""
STEP_FAILURES = ("STEP_FAILED", "NODE_FAILED")
"""Reasons of a decode node: a step with the request failed, or the node ended with it."""
HANDED_BACK = "DRAINING"
"""Reason of a decode node that stops or changes its role as planned. The request has no part in it."""
MAX_FAILED_STEPS = 2
"""A request that was in this many such steps, or had its turn as a suspect at this many nodes that were lost
without a word, counts as the cause. Decode nodes use the same number."""
PROVEN_TOKENS = 8
"""A request that has received this many tokens since is not the cause. Decode nodes use the same number."""
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    max_resumes: int
    wait_seconds: float
    """How long a request waits for a decode node that takes it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No decode node can take the request now: try again later."""

    seconds: float


class ResumeAttempts:
    """The attempts at one request, one after the other.

    The caller alternates `choose` and `begin`; then either `done` or `ended` follows. Messages of a decode
    node count only while `current` holds: tokens of an attempt that was given up never reach the log.

    resumable: False when the client prefers an error to a resume.
    """

    def __init__(self, log: TokenLog, policy: ResumePolicy, *, resumable: bool = True) -> None:
        self.number = 0
        """Number of the attempt that runs or runs next."""
        self.address = ""
        """Address of its node; empty: none."""
        self.resumed = 0
        """How often the request was resumed after a node was lost or had handed it back."""
        self.failed_steps = 0
        """Steps with the request that failed, or with which their node ended, since it last made progress."""
        self.suspect = False
        """A node was lost without a word before a token of the attempt there had come, since it last made
        progress."""
        self.has_turn = False
        """The request is the one suspect that is computed at its node."""
        self.done = False
        """No decode node will send anything more."""
        self._log = log
        self._policy = policy
        self._resumable = resumable
        self._retried_step = False  # the one retry of a failed step that costs no resume
        self._charged = 0  # resumes that count
        self._blameless = False  # the node was lost with another request under suspicion
        self._begun_with = 0  # output tokens when the attempt that runs was begun
        self._progress = False  # of the attempt that runs: the node has said something about the request
        self._failures: dict[str, int] = {}
        self._avoid: dict[str, float] = {}  # by node: not asked again before this time
        self._full: dict[str, BatonError] = {}  # nodes without room for a request without output
        self._since: float | None = None  # since when no node could be found
        self._last: BatonError | None = None

    def choose(self, nodes: Sequence[str], now: float, pick: Callable[[Sequence[str]], str]) -> str | Wait:
        """Returns the address of the node for the next attempt. Raises BatonError when the request is given
        up.

        nodes: addresses that could take the request. pick: chooses from at least one.

        A request without output that every node refuses for lack of room fails at once, so that clients learn
        of overload early. A request with output waits for room, and any request waits for a node.
        """
        full = self._full if not self._log.has_output else {}
        left = [node for node in nodes if node not in full]
        if nodes and not left:
            raise full[nodes[-1]]  # not the last error: that may be of a node that was lost since
        ready = [node for node in left if self._avoid.get(node, 0.0) <= now]
        if ready:
            return pick(ready)
        if self._since is None:
            self._since = now
        remaining = self._since + self._policy.wait_seconds - now
        if remaining <= 0:
            raise self._in_vain()
        due = [self._avoid[node] - now for node in left]
        return Wait(min([remaining, BACKOFF_SECONDS[-1] / 4, *due]))

    def begin(self, address: str) -> None:
        """The attempt has been sent there."""
        self.address = address
        self._begun_with = self._log.output_tokens
        self._progress = self.has_turn = self._blameless = False

    def current(self, address: str, attempt: int) -> bool:
        """Whether messages of this node about that attempt count."""
        return address == self.address and attempt == self.number

    def progress(self) -> None:
        """The node has sent something for the running attempt."""
        self._progress = True
        self._since = None

    def delivered(self) -> tuple[tuple[int, ...] | None, ...]:
        """What the next attempt carries, of each choice; None: it has finished. Empty: there is no output.

        Everything received counts as delivered, whether or not the client has read it: a position is sampled
        once.
        """
        if not self._log.has_output:
            return ()
        return tuple(None if choice.finished else tuple(choice.token_ids) for choice in self._log.choices)

    def fill(self, start: decode_pb2.DecodeStart) -> None:
        """Names the next attempt in its message, and adds what it carries."""
        start.attempt = self.number
        start.failed_steps, start.suspect = self.failed_steps, self.suspect
        for tokens in self.delivered():
            start.choices.add(token_ids=tokens or (), finished=tokens is None)
        if start.choices:
            start.sampling.ClearField("prompt_logprobs")  # they have come, before the first token

    def ended(self, error: BatonError, now: float, *, lost: bool) -> None:
        """The attempt has ended before the request. lost: the node is gone or silent, and did not say so.

        Returns when the request is to be placed again, or is `done`. Raises BatonError, the request's end.
        """
        if self._log.complete:
            self.done = True
            return
        address, self.address = self.address, ""
        if error.code not in _RETRYABLE or (self._log.has_output and not self._resumable):
            raise error
        refused = not lost and not self._progress and error.reason not in STEP_FAILURES
        if self._log.output_tokens - self._begun_with >= PROVEN_TOKENS:
            self.failed_steps, self.suspect = 0, False
        self.failed_steps += error.reason in STEP_FAILURES
        self.suspect = self.suspect or error.reason == "PREFILL_LOST"
        if lost and self.failed_steps >= MAX_FAILED_STEPS:
            text = f"{self.failed_steps} nodes ended with the request; it is not tried again: {error.message}"
            raise internal(text, "REPEATED_STEP_FAILURE")
        if error.reason == "STEP_FAILED" and not self._retried_step:
            self._retried_step, refused = True, False
        elif not refused:
            if not self._blameless and error.reason != HANDED_BACK:
                if self._charged >= self._policy.max_resumes:
                    text = f"given up after {self.resumed} resumes: {error.message}"
                    raise unavailable(text, "TOO_MANY_RESUMES")
                self._charged += 1
            self.resumed += 1
        elif error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.reason != "NO_PREFILL_NODE":
            self._full[address] = error
        failures = self._failures[address] = self._failures.get(address, 0) + 1
        self._avoid[address] = now + BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS)) - 1]
        if not refused or self._since is None:
            self._since = now
        self._last = error
        self.number += 1

    def _in_vain(self) -> BatonError:
        wait = f"{self._policy.wait_seconds:g} s"
        if self._last is None:
            return unavailable(f"no decode node could be reached within {wait}", "NO_DECODE_NODE", 1000)
        text = f"{self._last.message}; no decode node took the request up within {wait}"
        return BatonError(self._last.code, self._last.reason, text, retry_after_ms=1000)

    @property
    def _starting(self) -> bool:
        """No token of the attempt has come."""
        return self._log.output_tokens == self._begun_with

    @staticmethod
    def node_lost(attempts: Collection[ResumeAttempts]) -> None:
        """The connection to a node has broken without a word about these attempts, all that ran there.
        `ended` follows for each. Any of those without a token may have ended the node: they become suspects.
        One that was a suspect before, and had its turn, counts as the cause once."""
        tried = {id(each) for each in attempts if each.has_turn and each._starting}
        for each in attempts:
            each.failed_steps += id(each) in tried
            each._blameless = bool(tried - {id(each)})
            each.suspect = each.suspect or each._starting
