"""Which nodes a request goes to: by what is known of them, pure.

`cache` estimates for each node when the request would have its first token there; the nodes whose trees hold
the prompt's beginning win by what they need not compute, until their queues are longer than that is worth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.gateway.cache_view import CacheView, PromptPages
from baton.gateway.handoff_cost import Decision, Split
from baton.gateway.node_load import NodeLoad, SentLoad, Work
from baton.handoff.pull_cost import PullCost
from baton.rpc.errors import invalid
from baton.stepcost import StepCost
from baton.v1 import decode_pb2, node_pb2

POLICIES = ("cache", "least-loaded", "round-robin")

DEFAULT_PROMPT_RATE = 2000.0
"""Tokens a second, as long as no node has measured its own."""
PULL_RATE = 100_000.0
"""Tokens whose pages a decode node pulls in a second: far more than are computed."""
DEFAULT_STEP = 0.01
"""Seconds, as long as a decode node has not measured its own."""
STEPS_PER_ROW = 5.0
"""What one more row costs, in steps of its node: outputs of 250 tokens, each step 2 % longer."""
NO_ROOM_SECONDS = 1.0
"""For which a prompt waits where there are too few pages for it: nobody knows how long."""
NEARLY = 1.1
"""Times that differ by less than this factor are the same: measured rates differ by as much, and a few tokens
that all prompts begin with must not draw all of them to one node."""


def pick_decode(
    policy: str, nodes: Sequence[NodeLoad], tokens: int, turn: int = 0, preferred: str = ""
) -> str:
    """The address of the decode node for a prompt of so many tokens, out of at least one.

    turn: rises by one with each request. preferred: taken where it is as good as the best.
    """
    if policy == "round-robin":
        return nodes[turn % len(nodes)].address
    if policy == "least-loaded":
        fewest = min(node.rows for node in nodes)
        equal = [node.address for node in nodes if node.rows == fewest]
        return equal[turn % len(equal)]
    costs = {node.address: decode_seconds(node, tokens) for node in nodes}
    enough = min(costs.values()) + (NEARLY - 1) * tokens / PULL_RATE
    equal = [address for address, cost in costs.items() if cost <= enough]
    return preferred if preferred in equal else equal[turn % len(equal)]


def order_prefill(
    policy: str, nodes: Sequence[NodeLoad], tokens: int, turn: int, preferred: str = ""
) -> list[str]:
    """All prefill nodes, in the order to try them: likewise. One that is gone may come first: decode nodes
    know, and take the next."""
    if not nodes:
        return []
    start = turn % len(nodes)
    turned = [*nodes[start:], *nodes[:start]]
    if policy == "round-robin":
        return [node.address for node in turned]
    rate = _prompt_rate(nodes)
    by_cache = policy == "cache"
    costs = {
        node.address: prefill_seconds(node, tokens, rate) if by_cache else float(node.queued_tokens)
        for node in nodes
    }
    turned.sort(key=lambda node: costs[node.address])
    enough = costs[turned[0].address] * (NEARLY if by_cache else 1.0)
    equal = [node.address for node in nodes if costs[node.address] <= enough]
    first = preferred if by_cache and preferred in equal else equal[turn % len(equal)]
    return [first, *(node.address for node in turned if node.address != first)]


def prefill_seconds(node: NodeLoad, tokens: int, rate: float) -> float:
    """Until a prompt of so many tokens would be computed there. rate: tokens a second, for a node that has
    measured none."""
    left = max(1, tokens - node.cached)
    return (node.queued_tokens + left) / (node.prompt_rate or rate) + _for_room(node)


def decode_seconds(node: NodeLoad, tokens: int) -> float:
    """What a decode node makes a prompt of so many tokens wait, and what it makes the others there wait."""
    pull = max(0, tokens - node.cached) / PULL_RATE
    rows = STEPS_PER_ROW * node.rows * (node.step or DEFAULT_STEP)
    return node.wait + pull + rows + _for_room(node)


def _for_room(node: NodeLoad) -> float:
    return NO_ROOM_SECONDS if node.known and node.needed_pages > node.free_pages else 0.0


def _prompt_rate(nodes: Sequence[NodeLoad]) -> float:
    """A rate for those that have measured none: the others' mean."""
    rates = [node.prompt_rate for node in nodes if node.prompt_rate]
    return sum(rates) / len(rates) if rates else DEFAULT_PROMPT_RATE


class _Node:
    def __init__(self) -> None:
        self.view = CacheView()
        self.sent = SentLoad()
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

    def sent(self, address: str) -> SentLoad:
        return self._node(address).sent

    def settle(self, address: str) -> None:
        """To be called whenever its view has been fed: what the node says goes with what it had been sent."""
        self._node(address).settle()

    def forget(self, address: str) -> None:
        """The node has been left."""
        self._nodes.pop(address, None)

    def _node(self, address: str) -> _Node:
        return self._nodes.setdefault(address, _Node())

    def figures(self, address: str, prompt: PromptPages, preferred: str) -> NodeLoad:
        """preferred: the node that a session's last turn ran on, which is taken to hold the prompt where it
        tells nothing of its tree."""
        node = self._nodes.get(address) or _Node()
        view, sent = node.view, node.sent
        guess = len(prompt.tokens) if address == preferred else 0
        cached = view.cached(prompt) if view.page_size else guess
        load = view.fresh_load(self.clock())
        if load is None:
            work = sent.work(others=False)
            return NodeLoad(address, cached, work.tokens, work.rows, running=work.running, keys=work.keys)
        node.settle()
        work = sent.work()
        return NodeLoad(
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


class RequestRouting:
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
        self._at_decode: SentLoad | None = None
        self._at_prefill: SentLoad | None = None
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

    def _figures(self, address: str, preferred: str) -> NodeLoad:
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
