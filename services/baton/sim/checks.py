"""`Ledger` checks what clients get, at every token and every end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.plan import Logprobs
from baton.gateway.resume import MAX_FAILED_STEPS
from baton.sim.model import POISONS, Windows, prompt_logprobs, reference
from baton.sim.scenario import Scenario
from baton.sim.scenario_requests import RequestSpec
from baton.sim.world import Violation, World
from baton.v1 import inference_pb2

_OUTAGES = ("crash", "stall", "hang", "cut", "drop", "drain", "slow", "kill-rank", "stall-rank")
EXCUSES = {
    "UNAVAILABLE": _OUTAGES,
    "STEP_FAILED": ("step",),
    "INTERNAL": ("step",),
}
"""A request may fail with such a code, or reason, only after one of these faults; with any other never."""


@dataclass(slots=True)
class _Account:
    spec: RequestSpec
    expected: tuple[tuple[int, ...], ...]
    got: list[list[int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ended: str = ""
    cancelled: bool = False
    lost_turns: int = 0


class Ledger:
    """For all clients of a run."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self._world = world
        self._scenario = scenario
        self._accounts = {spec.number: _account(spec, scenario.windows) for spec in scenario.requests}
        specs = scenario.requests
        self._poison = next((spec for spec in specs if spec.params.seed in POISONS), None)
        self._ranked = any(machine.ranks > 1 for _, machine in (*scenario.prefill, *scenario.decode))
        self.tokens = 0
        self.resumed = 0
        """How often a request with output was resumed."""

    @property
    def complete(self) -> bool:
        return all(account.ended for account in self._accounts.values())

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of requests by outcome."""
        counts: dict[str, int] = {}
        for account in self._accounts.values():
            counts[account.ended or "open"] = counts.get(account.ended or "open", 0) + 1
        return dict(sorted(counts.items()))

    def deliver(self, number: int, choice: int, tokens: Sequence[int], text: str) -> None:
        account = self._open(number, f"tokens {list(tokens)}")
        for token in tokens:
            self._deliver_one(account, choice, token)
        account.text[choice] += text

    def prompt(self, number: int, logprobs: Sequence[Logprobs]) -> None:
        if tuple(logprobs) != self._logprobs_of(number):
            raise Violation(f"tokens: request {number} got other log-probabilities of its prompt: {logprobs}")

    def _logprobs_of(self, number: int) -> tuple[Logprobs, ...]:
        return prompt_logprobs(self._accounts[number].spec.prompt, self._scenario.windows)

    def _deliver_one(self, account: _Account, choice: int, token: int) -> None:
        number = account.spec.number
        got, expected = account.got[choice], account.expected[choice]
        if len(got) >= len(expected):
            raise Violation(f"tokens: request {number} choice {choice} got a token after its last")
        if token != expected[len(got)]:
            raise Violation(
                f"tokens: request {number} choice {choice} got {token} for its token {len(got)}, "
                f"the reference is {expected[len(got)]}"
            )
        got.append(token)
        self.tokens += 1

    def cancelled(self, number: int) -> bool:
        """The client cancels a request. Returns False if it has ended."""
        account = self._accounts[number]
        account.cancelled = True
        return not account.ended

    def finished(self, number: int, usage: inference_pb2.Usage) -> None:
        account = self._open(number, "finished")
        account.ended = "finished"
        self._world.note("client", f"{number} finished {account.got}")
        if tuple(tuple(choice) for choice in account.got) != account.expected:
            raise Violation(f"tokens: request {number} finished with tokens missing")
        counted, received = usage.output_tokens, sum(map(len, account.expected))
        if counted != received or usage.prompt_tokens != len(account.spec.prompt):
            raise Violation(f"count: request {number} has {received} tokens, and is told of {counted}")
        if account.text != [_shown(choice, account.spec) for choice in account.expected]:
            raise Violation(f"tokens: request {number} finished with another text: {account.text}")

    def failed(self, number: int, code: str, reason: str, message: str) -> None:
        account = self._open(number, f"{code} {reason}")
        account.ended = code
        self._world.note("client", f"{number} {code} {reason} {account.got}")
        if not self._excused(account, code, reason, message):
            raise Violation(
                f"excuse: request {number} failed with {code} ({reason}: {message}), and nothing that "
                "happened excuses it"
            )

    def lost_turn(self, number: int) -> None:
        """A decode node was lost without a word while it computed the request as its one suspect."""
        self._accounts[number].lost_turns += 1

    def lost(self, number: int) -> None:
        """The client's own connection has ended with its gateway."""
        if not self._accounts[number].ended:
            self._accounts[number].ended = "gateway died"

    def _open(self, number: int, what: str) -> _Account:
        account = self._accounts[number]
        if account.ended:
            raise Violation(f"terminal: request {number} got {what} after it had ended ({account.ended})")
        return account

    def _excused(self, account: _Account, code: str, reason: str, message: str) -> bool:
        spec, now = account.spec, self._world.now
        if code == "CANCELLED":
            return account.cancelled
        if code == "DEADLINE_EXCEEDED":
            return now >= spec.at + spec.timeout - 0.001 and not spec.probe
        if reason == "SLOW_READER" and not spec.rests:
            return any(fault.kind == "stall" and fault.at <= now for fault in self._scenario.faults)
        if code == "RESOURCE_EXHAUSTED":
            # Simulated nodes have not measured their steps: what hangs in the first one counts as usual.
            hung = any(fault.kind == "hang" and fault.at <= now for fault in self._scenario.faults)
            # Else overload is enough: leases revoked, pages overwritten, nothing left to try.
            return not spec.probe or (reason == "WOULD_MISS_DEADLINE" and hung)
        if code == "UNAVAILABLE" and spec.resume:
            in_vain = reason == "TOO_MANY_RESUMES" or "no decode node" in message
            if not in_vain:
                return False  # it should have been resumed, or have waited
        if reason == "REPEATED_STEP_FAILURE" and account.lost_turns >= MAX_FAILED_STEPS and not spec.probe:
            return True  # faults ended nodes in its turns only: nobody could tell it from the cause
        if reason in ("REPEATED_STEP_FAILURE", "NODE_FAILED") and self._poison is not None:
            # All others are resumed, unless their clients prefer an error.
            excused = spec is self._poison or (reason == "NODE_FAILED" and not spec.resume)
            return excused or any(fault.kind == "step" and fault.at <= now for fault in self._scenario.faults)
        if code == "UNAVAILABLE" and self._poison is not None and self._poison.at <= now:
            return not spec.probe  # a node that the poisonous request ends is as good as a crashed one
        kinds = EXCUSES.get(reason, EXCUSES.get(code, ()))
        if self._ranked:
            kinds = (*kinds, "step")  # it ends a worker of several ranks
        if code == "UNAVAILABLE" and not spec.resume:
            if self._scenario.gateway.auto_roles is not None:
                return True  # a change of role needs no fault; others go on elsewhere
            kinds = (*kinds, "role")
        return not spec.probe and any(f.kind in kinds and f.at <= now for f in self._scenario.faults)


def _account(spec: RequestSpec, windows: Windows) -> _Account:
    params = spec.params
    constrained = params.grammar is not None
    options = (params.max_tokens, params.stop_token_ids, params.penalized, windows, constrained)
    full = (reference(spec.prompt, params.seed + i, *options) for i in range(spec.n))
    expected = tuple(_until_stop(choice, spec.stop) for choice in full)
    return _Account(spec, expected, [[] for _ in expected], ["" for _ in expected])


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def _until_stop(tokens: tuple[int, ...], stop: Sequence[str]) -> tuple[int, ...]:
    """The token that completes a stop string is the last."""
    for end in range(1, len(tokens)):
        if any(string in text_of(tokens[:end]) for string in stop):
            return tokens[:end]
    return tokens


def _shown(tokens: Sequence[int], spec: RequestSpec) -> str:
    """The text of the tokens up to the first stop string, or the token that stopped them."""
    stop, ended = spec.stop, tokens[-1] in spec.params.stop_token_ids
    text = text_of(tokens[:-1] if ended else tokens)
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]
