"""The load of one node, as the gateway knows it: what it reported, and what was sent to it since. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.pull_cost import PullCost
from baton.stepcost import StepCost


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One node as seen for one prompt. It is a moment old, and may be wrong: what is decided by it costs time
    at worst. 0 where nothing is known yet."""

    address: str
    cached: int = 0
    """Leading tokens of this prompt that its prefix tree holds."""
    queued_tokens: int = 0
    """Prompt tokens that it is still to compute: of requests that it has, and of those just sent to it."""
    rows: int = 0
    """Sequences in its batch or waiting for it, and those just sent to it (decode)."""
    free_pages: int = 0
    """Free, or evictable: a new request could take them."""
    needed_pages: int = 0
    """What this prompt would take of them; 0 where the size of a page is not known."""
    wait: float = 0.0
    """Seconds that a request would wait for a row (decode)."""
    step: float = 0.0
    """Seconds that a step with decode rows takes."""
    prompt_rate: float = 0.0
    """Prompt tokens that it computes in a second, when it does nothing else."""
    known: bool = False
    """The node has told of itself just now; else there is only what this gateway has sent to it."""
    running: int = 0
    """Of the rows, those that steps hold now: prompts have been computed (decode)."""
    keys: int = 0
    """Positions that these attend to, together (decode)."""
    step_tokens: int = 0
    """Tokens that a step holds at most."""
    cost: StepCost | None = None
    """What its steps cost; None: not known."""
    pull: PullCost = field(default=PullCost())
    """What pulling pages takes (decode)."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a node has to do."""

    tokens: int = 0
    """Prompt tokens still to be computed there."""
    rows: int = 0
    """Sequences in its batch, waiting for it, or on their way (decode)."""
    running: int = 0
    """Of these, those that steps hold now: their prompts have been computed."""
    keys: int = 0
    """Positions that the running ones attend to, together."""


@dataclass(slots=True)
class _Request:
    tokens: int
    prompt: int
    running: bool = False


class SentLoad:
    """Requests on their way to a node, or there, by number. All calls may name one that is not known."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self._others = Work()
        self.tokens = 0
        """Prompt tokens to be computed there, of requests that were sent there."""
        self._running = self._keys = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: int, tokens: int, prompt: int = 0) -> None:
        """`tokens`: of its prompt, to be computed there. `prompt`: how many a row of it attends to there."""
        self.drop(request)
        self._requests[request] = _Request(tokens, prompt)
        self.tokens += tokens

    def computed(self, request: int) -> None:
        """Its prompt has been, wherever."""
        sent = self._requests.get(request)
        if sent is not None and not sent.running:
            sent.running = True
            self.tokens -= sent.tokens
            self._running += 1
            self._keys += sent.prompt

    def drop(self, request: int) -> None:
        sent = self._requests.pop(request, None)
        if sent is not None and sent.running:
            self._running -= 1
            self._keys -= sent.prompt
        elif sent is not None:
            self.tokens -= sent.tokens

    def told(self, said: Work) -> None:
        """The node has just said this of itself."""
        own = self._own()
        running = max(0, said.running - own.running)
        self._others = Work(
            tokens=max(0, said.tokens - own.tokens),
            rows=max(0, said.rows - own.rows),
            running=running,
            keys=said.keys * running // max(1, said.running),
        )

    def work(self, *, others: bool = True) -> Work:
        """`others`: with what is not this gateway's."""
        own, more = self._own(), self._others if others else Work()
        return Work(
            own.tokens + more.tokens,
            own.rows + more.rows,
            own.running + more.running,
            own.keys + more.keys,
        )

    def _own(self) -> Work:
        return Work(self.tokens, len(self._requests), self._running, self._keys)
