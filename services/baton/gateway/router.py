"""Chooses nodes for requests, by what the nodes tell and what was sent to them. Pure, the clock passed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.gateway.cache_view import CacheView, PromptPages
from baton.gateway.figures import NodeFigures
from baton.gateway.routing import POLICIES, order_prefill, pick_decode
from baton.gateway.sent import Sent, Work
from baton.gateway.split import Decision, Split
from baton.handoff.pull_cost import PullCost
from baton.rpc.errors import invalid
from baton.stepcost import StepCost
from baton.v1 import decode_pb2, node_pb2


class _Node:
    def __init__(self) -> None:
        self.view = CacheView()
        self.sent = Sent()
        self._load: node_pb2.Load | None = None

    def settle(self) -> None:
        """Takes in what the node has told of its work, if it has since the last time."""
        load = self.view.load
        if load is not None and load is not self._load:
            self._load = load
            rows = load.rows + load.waiting
            self.sent.told(Work(load.queued_tokens, rows, load.running, load.keys))


class Router:
    """All nodes that requests may go to, prefill and decode, by address."""

    def __init__(self, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises BatonError for an unknown policy."""
        if policy not in POLICIES:
            raise invalid("routing", f"--routing {policy!r} is not known; use {', '.join(POLICIES)}")
        self.policy = policy
        self.clock = clock
        self._nodes: dict[str, _Node] = {}

    def view(self, address: str) -> CacheView:
        """Of this node, to be fed."""
        return self._node(address).view

    def sent(self, address: str) -> Sent:
        return self._node(address).sent

    def settle(self, address: str) -> None:
        """To be called whenever its view has been fed: what the node says goes with what it had been sent."""
        self._node(address).settle()

    def forget(self, address: str) -> None:
        """The node has been left."""
        self._nodes.pop(address, None)

    def _node(self, address: str) -> _Node:
        return self._nodes.setdefault(address, _Node())

    def figures(self, address: str, prompt: PromptPages, preferred: str) -> NodeFigures:
        """preferred: the node that a session's last turn ran on, which is taken to hold the prompt where it
        tells nothing of its tree."""
        node = self._nodes.get(address) or _Node()
        view, sent = node.view, node.sent
        guess = len(prompt.tokens) if address == preferred else 0
        cached = view.cached(prompt) if view.page_size else guess
        load = view.fresh_load(self.clock())
        if load is None:
            work = sent.work(others=False)
            return NodeFigures(address, cached, work.tokens, work.rows, running=work.running, keys=work.keys)
        node.settle()
        work = sent.work()
        return NodeFigures(
            address,
            cached=cached,
            queued_tokens=work.tokens,
            rows=work.rows,
            free_pages=load.available_pages,
            needed_pages=-(-(len(prompt.tokens) - cached) // view.page_size),
            wait=load.wait_ms / 1000,
            step=load.step_us / 1e6,
            prompt_rate=float(load.prompt_tokens_per_second),
            known=True,
            running=work.running,
            keys=work.keys,
            step_tokens=load.step_tokens,
            cost=_step_cost(load),
            pull=PullCost(load.pull_cost.fixed, load.pull_cost.token),
        )


def _step_cost(load: node_pb2.Load) -> StepCost | None:
    said = load.step_cost
    known = load.HasField("step_cost")
    return StepCost(said.fixed, said.row, said.key, said.token, said.pair) if known else None


class Way:
    """One request's way through the nodes."""

    def __init__(
        self,
        router: Router,
        number: int,
        prompt: PromptPages,
        preferred_decode: str = "",
        preferred_prefill: str = "",
    ) -> None:
        """number: of the request, one more with each. preferred: see Router.figures."""
        self._router = router
        self._number = number
        self._prompt = prompt
        self._preferred_decode = preferred_decode
        self._preferred_prefill = preferred_prefill
        self._at_decode: Sent | None = None
        self._at_prefill: Sent | None = None
        self._decision: Decision | None = None
        self._sent_at = 0.0
        self._cached: dict[str, int] = {}
        """What the nodes were taken to hold of the prompt, when the request was last sent."""

    def pick_decode(self, addresses: Sequence[str]) -> str:
        """Out of at least one."""
        nodes = [self._figures(address, self._preferred_decode) for address in addresses]
        self._cached = {node.address: node.cached for node in nodes}
        tokens = len(self._prompt.tokens)
        return pick_decode(self._router.policy, nodes, tokens, self._number, self._preferred_decode)

    def order_prefill(self, addresses: Sequence[str]) -> list[str]:
        nodes = [self._figures(address, self._preferred_prefill) for address in addresses]
        self._cached |= {node.address: node.cached for node in nodes}
        tokens = len(self._prompt.tokens)
        return order_prefill(self._router.policy, nodes, tokens, self._number, self._preferred_prefill)

    def _figures(self, address: str, preferred: str) -> NodeFigures:
        return self._router.figures(address, self._prompt, preferred)

    def decide(
        self, split: Split, decode: str, prefill: Sequence[str], hand_off: bool | None = None
    ) -> int | None:
        """For DecodeStart.local_prefill_tokens of an attempt at this decode node, with this order of prefill
        nodes. hand_off: the client's word."""
        here = self._figures(decode, self._preferred_decode)
        there = self._figures(prefill[0], self._preferred_prefill) if prefill else None
        self._decision = split.decide(here, there, len(self._prompt.tokens), hand_off)
        return self._decision.limit

    def sent(self, decode: str, prefill: Sequence[str]) -> None:
        """The attempt has been sent."""
        self.ended()
        self._sent_at = self._router.clock()
        tokens = len(self._prompt.tokens)
        local = not prefill or (self._decision is not None and self._decision.local)
        self._at_decode = self._router.sent(decode)
        self._at_decode.add(
            self._number, max(0, tokens - self._cached.get(decode, 0)) if local else 0, tokens
        )
        if not local:
            self._at_prefill = self._router.sent(prefill[0])
            self._at_prefill.add(self._number, max(0, tokens - self._cached[prefill[0]]))

    def computed(self) -> None:
        """The prompt of the attempt has been computed."""
        if self._at_decode is not None:
            self._at_decode.computed(self._number)
        if self._at_prefill is not None:
            self._at_prefill.drop(self._number)
            self._at_prefill = None

    def reckon(self, split: Split, stats: decode_pb2.RequestStats, first: float) -> None:
        """The first attempt has finished; its first token had come at `first`, on the clock."""
        if self._decision is not None:
            now = self._router.clock()
            split.ended(self._decision, stats, first - self._sent_at, now - self._sent_at)

    def ended(self) -> None:
        """Nothing of the request is left at any node. Idempotent."""
        self.computed()
        if self._at_decode is not None:
            self._at_decode.drop(self._number)
            self._at_decode = None

    def predicted(self, stats: decode_pb2.RequestStats, decode: str) -> int:
        """Tokens of the prompt that the node which computed it was taken to hold."""
        return self._cached.get(stats.prefill_address or decode, 0)
