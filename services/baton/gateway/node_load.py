"""The load of one node: what it reported, and what this gateway has sent to it since. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.pull_cost import PullCost
from baton.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """The load of one node, with respect to one prompt. It may be old or wrong, which only costs time. 0:
    not known yet."""

    address: str
    cached: int = 0
    """Leading tokens of this prompt that its prefix trees hold."""
    promotion: float = 0.0
    """Seconds to copy those of them to its pool that only its host tier has."""
    queued_tokens: int = 0
    """Prompt tokens still to compute, including those of requests just sent to it."""
    rows: int = 0
    """Sequences in its batch, waiting for it, or just sent to it (decode)."""
    free_pages: int = 0
    """Free or evictable pages that a new request could take."""
    needed_pages: int = 0
    """Pages that this prompt would take; 0 if the page size is not known."""
    wait: float = 0.0
    """Seconds that a request would wait for a row (decode)."""
    step: float = 0.0
    """Seconds that a step with decode rows takes."""
    prompt_rate: float = 0.0
    """Prompt tokens per second when it does nothing else."""
    known: bool = False
    """Whether the node has reported recently; else only this gateway's own requests are known."""
    running: int = 0
    """Rows in steps now: their prompts have been computed (decode)."""
    context_tokens: int = 0
    """Context tokens of these rows together (decode)."""
    step_tokens: int = 0
    """Tokens that a step holds at most."""
    cost: StepCost | None = None
    """Step cost; None: not known."""
    pull: PullCost = field(default=PullCost())
    """Cost of pulls (decode)."""
    borrow: PullCost | None = None
    """Cost of pulls out of other nodes' prefix trees; None: not known."""


@dataclass(frozen=True, slots=True)
class NodeWork:
    """Work at a node."""

    tokens: int = 0
    """Prompt tokens still to be computed there."""
    rows: int = 0
    """Sequences in its batch, waiting for it, or under way to it (decode)."""
    running: int = 0
    """Sequences in steps now, as a part of the node's rows: their prompts have been computed."""
    context_tokens: int = 0
    """Context tokens of the running sequences together."""


@dataclass(slots=True)
class _Request:
    tokens: int
    prompt: int
    running: bool = False


class SentLoad:
    """Requests under way to a node or there, by number. Calls may name unknown ones."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self._others = NodeWork()
        self.tokens = 0
        """Prompt tokens still to compute there, of requests sent there."""
        self._running = self._context_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: int, tokens: int, prompt: int = 0) -> None:
        """`tokens`: prompt tokens to compute there. `prompt`: context tokens of its row there."""
        self.drop(request)
        self._requests[request] = _Request(tokens, prompt)
        self.tokens += tokens

    def computed(self, request: int) -> None:
        """The request's prompt has been computed, here or elsewhere."""
        sent = self._requests.get(request)
        if sent is not None and not sent.running:
            sent.running = True
            self.tokens -= sent.tokens
            self._running += 1
            self._context_tokens += sent.prompt

    def drop(self, request: int) -> None:
        sent = self._requests.pop(request, None)
        if sent is not None and sent.running:
            self._running -= 1
            self._context_tokens -= sent.prompt
        elif sent is not None:
            self.tokens -= sent.tokens

    def reported(self, report: NodeWork) -> None:
        """The node has just reported this."""
        sent_here = self._sent_here()
        running = max(0, report.running - sent_here.running)
        self._others = NodeWork(
            tokens=max(0, report.tokens - sent_here.tokens),
            rows=max(0, report.rows - sent_here.rows),
            running=running,
            context_tokens=report.context_tokens * running // max(1, report.running),
        )

    def work(self, *, others: bool = True) -> NodeWork:
        """`others`: include the work of other gateways."""
        sent_here, more = self._sent_here(), self._others if others else NodeWork()
        return NodeWork(
            sent_here.tokens + more.tokens,
            sent_here.rows + more.rows,
            sent_here.running + more.running,
            sent_here.context_tokens + more.context_tokens,
        )

    def _sent_here(self) -> NodeWork:
        return NodeWork(self.tokens, len(self._requests), self._running, self._context_tokens)
