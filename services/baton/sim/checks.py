"""Checks from outside the processes. `Ledger` checks what clients get, at every token and every end.
`Audit` checks that each side of a hand-off knows what the other believes to be running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.engine.plan import Logprobs
from baton.sim.decode import SimDecode
from baton.sim.model import POISONS, Windows, prompt_logprobs, reference
from baton.sim.network import Network
from baton.sim.prefill import SimPrefill
from baton.sim.process import SimProcess, Worker
from baton.sim.scenario import RequestSpec, Scenario
from baton.sim.world import Actor, Violation, World

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

    def prompt(self, number: int, logprobs: Sequence[Logprobs] | None) -> None:
        """None: not requested."""
        if logprobs is not None and tuple(logprobs) != self._logprobs_of(number):
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

    def finished(self, number: int) -> None:
        account = self._open(number, "finished")
        account.ended = "finished"
        self._world.note("client", f"{number} finished {account.got}")
        if tuple(tuple(choice) for choice in account.got) != account.expected:
            raise Violation(f"tokens: request {number} finished with tokens missing")
        if account.text != [_shown(choice, account.spec.stop) for choice in account.expected]:
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
        if code == "RESOURCE_EXHAUSTED":
            return (
                not spec.probe
            )  # overload is enough: leases revoked, pages overwritten, nothing left to try
        if code == "UNAVAILABLE" and spec.resume:
            in_vain = reason == "TOO_MANY_RESUMES" or "no decode node" in message
            if not in_vain:
                return False  # it should have been resumed, or have waited
        if reason in ("REPEATED_STEP_FAILURE", "NODE_FAILED") and self._poison is not None:
            # All others are resumed, unless their clients prefer an error.
            excused = spec is self._poison or (reason == "NODE_FAILED" and not spec.resume)
            return excused or any(fault.kind == "step" and fault.at <= now for fault in self._scenario.faults)
        if code == "UNAVAILABLE" and self._poison is not None and self._poison.at <= now:
            return not spec.probe  # a node that the poisonous request ends is as good as a crashed one
        kinds = EXCUSES.get(reason, EXCUSES.get(code, ()))
        if self._ranked:
            kinds = (*kinds, "step")  # it ends a worker of several ranks
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


def _shown(tokens: Sequence[int], stop: Sequence[str]) -> str:
    """The text of the tokens up to the first stop string."""
    text = text_of(tokens)
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]


EVERY_SECONDS = 0.5
TOLERATED_SECONDS = 4.0
"""How long a difference may last without an excuse. A pull that was stopped may take
LATEST_FIRST_LOOK_SECONDS to see that."""


class Audit:
    def __init__(self, world: World, network: Network, processes: Mapping[str, SimProcess]) -> None:
        self._world = world
        self._network = network
        self._processes = processes
        self._actor = Actor("audit")
        self._seen: dict[tuple[object, ...], int] = {}
        self._again()

    def _again(self) -> None:
        self._world.at(EVERY_SECONDS, self._actor, self._look)

    def _look(self) -> None:
        wrong = dict((*self._waits(), *self._leaks(), *self._overdue(), *self._pulls()))
        self._seen = {what: self._seen.get(what, 0) + 1 for what in wrong}
        for what, count in self._seen.items():
            if count * EVERY_SECONDS > TOLERATED_SECONDS:
                raise Violation(wrong[what])
        self._again()

    def _of(self, kind: type[SimDecode] | type[SimPrefill]) -> Iterator[SimProcess]:
        return (process for process in self._processes.values() if isinstance(process, kind))

    def _healthy(self, a: SimProcess, b: SimProcess) -> bool:
        now = self._world.now
        stalled = any(actor.stalled_until > now for p in (a, b) for actor in (p.loop, p.step_thread))
        stalled |= any(p.hangs_until > now for p in (a, b) if isinstance(p, Worker))
        return not (stalled or self._network.is_cut(a.name, b.name) or self._network.is_slow(a.name, b.name))

    def _waits(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            for name, address, _ in decode.core.handoffs.under_way():
                peer = decode.partner(address)
                if peer is not None and not peer.side.knows(name) and self._healthy(decode, peer):
                    text = f"{decode.who} waits for {name} at {peer.who}, which knows nothing of it"
                    yield ("waits", decode.who, peer.who, name), f"silence: {text}"

    def _leaks(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for prefill in self._of(SimPrefill):
            assert isinstance(prefill, SimPrefill)
            for name, decode in prefill.under_way():
                unwanted = isinstance(decode, SimDecode) and not decode.core.handoffs.knows(name)
                if isinstance(decode, SimDecode) and unwanted and self._healthy(decode, prefill):
                    text = f"{prefill.who} holds {name} for {decode.who}, which knows nothing of it"
                    yield ("holds", decode.who, prefill.who, name), f"leak: {text}"

    def _overdue(self) -> Iterator[tuple[tuple[object, ...], str]]:
        """Each node keeps the time limits of what it holds, whatever its peers say."""
        for prefill in self._of(SimPrefill):
            assert isinstance(prefill, SimPrefill)
            side, grace = prefill.core.side, prefill.config.lease_grace_seconds
            for name, attempt in side._attempts.items():
                limit = min(attempt.request.deadline, side._heard[attempt.holder] + grace)
                if limit < prefill.clock() and self._healthy(prefill, prefill):
                    text = f"{prefill.who} holds {name} beyond its deadline or its lease"
                    yield ("overdue", prefill.who, name), f"leak: {text}"
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            for key, state in decode.core.unfinished.items():
                if state.request.deadline < decode.clock() and self._healthy(decode, decode):
                    text = f"{decode.who} runs request {key.request} beyond its deadline"
                    yield ("overdue", decode.who, key), f"leak: {text}"

    def _pulls(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            awaited = {pull for _, _, pull in decode.core.handoffs.under_way()}
            for number in decode.pulls_before_their_step():
                copies = decode.copy_thread.stalled_until <= self._world.now
                if number not in awaited and copies and self._healthy(decode, decode):
                    text = f"pull {number} of {decode.who} waits for its step, and nobody for its pages"
                    yield ("pulls", decode.who, number), f"leak: {text}"
