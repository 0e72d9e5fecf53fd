"""Routing policies: choose nodes from their loads. Pure.

`cache` predicts for each node when the request would get its first token there. Nodes that hold the prompt's
beginning win by the tokens they need not compute, until their queues cost more than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.gateway.cache_view import CacheView, PromptPages
from baton.gateway.node_load import NodeLoad, NodeWork, SentLoad
from baton.gateway.split_decision import Decision, Split
from baton.handoff.pull_cost import PullCost
from baton.rpc.errors import invalid
from baton.step_cost import StepCost
from baton.v1 import cache_pb2, common_pb2, decode_pb2, node_pb2

POLICIES = ("cache", "least-loaded", "round-robin")

DEFAULT_PROMPT_RATE = 2000.0
"""Tokens per second, until a node has measured its own rate."""
PULL_RATE = 100_000.0
"""Tokens per second whose pages a decode node pulls: far more than it computes."""
DEFAULT_STEP = 0.01
"""Seconds, until a decode node has measured its own step time."""
STEPS_PER_ROW = 5.0
"""Cost of one more row, in steps of its node: outputs of 250 tokens, each step 2 % longer."""
NO_ROOM_SECONDS = 1.0
"""Assumed wait for pages if there are too few for the prompt; the true wait is unknown."""
NEARLY = 1.1
"""Times that differ by less than this factor count as equal: measured rates vary as much, and a few tokens
that all prompts begin with must not draw all prompts to one node."""


def pick_decode(
    policy: str, nodes: Sequence[NodeLoad], tokens: int, turn: int = 0, preferred: str = ""
) -> str:
    """The address of the decode node for a prompt of `tokens` tokens, from at least one.

    turn: counts requests. preferred: chosen if it is as good as the best.
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
    """All prefill nodes in the order to try them, by the same rule. A lost one may come first: decode
    nodes skip it."""
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
    """Predicted seconds until a prompt of `tokens` tokens would be computed there. rate: tokens per second
    for a node without a measured rate."""
    left = max(1, tokens - node.cached)
    return (node.queued_tokens + left) / (node.prompt_rate or rate) + node.promotion + _for_room(node)


def with_borrowed(node: NodeLoad, most: int) -> NodeLoad:
    """The node as if it held `most` leading tokens, which another one holds, if it gets them sooner than it
    computes them."""
    more = most - node.cached
    if node.borrow is None or more <= 0 or not node.prompt_rate:
        return node
    seconds = node.borrow.seconds(more)
    if seconds >= more / node.prompt_rate:
        return node
    return replace(node, cached=most, promotion=node.promotion + seconds)


def decode_seconds(node: NodeLoad, tokens: int) -> float:
    """Predicted wait of a prompt of `tokens` tokens at a decode node, plus the delay it causes for others
    there."""
    pull = max(0, tokens - node.cached) / PULL_RATE
    rows = STEPS_PER_ROW * node.rows * (node.step or DEFAULT_STEP)
    return node.wait + pull + node.promotion + rows + _for_room(node)


def _for_room(node: NodeLoad) -> float:
    return NO_ROOM_SECONDS if node.known and node.needed_pages > node.free_pages else 0.0


def _prompt_rate(nodes: Sequence[NodeLoad]) -> float:
    """The rate for nodes without a measured one: the mean of the others."""
    rates = [node.prompt_rate for node in nodes if node.prompt_rate]
    return sum(rates) / len(rates) if rates else DEFAULT_PROMPT_RATE


MAX_SOURCES = 4
"""Nodes named for a prompt: each may be asked, one after the other."""


class _RoutedNode:
    def __init__(self) -> None:
        self.view = CacheView()
        self.sent = SentLoad()


class Router:
    """All prefill and decode nodes that requests may go to, by address."""

    def __init__(self, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises BatonError for an unknown policy."""
        if policy not in POLICIES:
            raise invalid("routing", f"--routing {policy!r} is not known; use {', '.join(POLICIES)}")
        self.policy = policy
        self.clock = clock
        self._nodes: dict[str, _RoutedNode] = {}

    def view(self, address: str) -> CacheView:
        return self._node(address).view

    def sent(self, address: str) -> SentLoad:
        return self._node(address).sent

    def update(self, address: str, update: cache_pb2.CacheUpdate) -> None:
        """Applies a node's report to its view, and compares its load with what has been sent to it. Raises
        Gap: see CacheView.apply."""
        node, load = self._node(address), update.load
        node.view.apply(update, self.clock())
        node.sent.reported(NodeWork(load.queued_tokens, load.rows + load.waiting, load.running, load.keys))

    def forget(self, address: str) -> None:
        """Forgets a node that was removed."""
        self._nodes.pop(address, None)

    def _node(self, address: str) -> _RoutedNode:
        return self._nodes.setdefault(address, _RoutedNode())

    def reporting(self) -> list[str]:
        """Nodes that have reported their trees, and something lately."""
        now = self.clock()
        views = ((address, node.view) for address, node in self._nodes.items())
        return [a for a, view in views if view.page_size and view.fresh_load(now) is not None]

    def load_of(self, address: str, prompt: PromptPages, preferred: str) -> NodeLoad:
        """preferred: the node of the session's last turn. It is assumed to hold the prompt if it does not
        report its tree."""
        node = self._nodes.get(address) or _RoutedNode()
        view, sent = node.view, node.sent
        guess = len(prompt.tokens) if address == preferred else 0
        here, cached = view.cached(prompt) if view.page_size else (guess, guess)
        load = view.fresh_load(self.clock())
        if load is None:
            work = sent.work(others=False)
            return NodeLoad(
                address,
                cached,
                work.tokens,
                work.rows,
                running=work.running,
                context_tokens=work.context_tokens,
            )
        work = sent.work()
        if load.host_token_seconds * load.prompt_tokens_per_second >= 1:
            cached = here  # it computes them sooner
        return NodeLoad(
            address,
            cached=cached,
            promotion=(cached - here) * load.host_token_seconds,
            queued_tokens=work.tokens,
            rows=work.rows,
            free_pages=load.available_pages,
            needed_pages=-(-(len(prompt.tokens) - here) // view.page_size),
            wait=load.wait_ms / 1000,
            step=load.step_us / 1e6,
            prompt_rate=float(load.prompt_tokens_per_second),
            known=True,
            running=work.running,
            context_tokens=work.context_tokens,
            step_tokens=load.step_tokens,
            cost=_step_cost(load),
            pull=PullCost(load.pull_cost.fixed, load.pull_cost.token),
            borrow=PullCost(load.borrow_cost.fixed, load.borrow_cost.token)
            if load.HasField("borrow_cost")
            else None,
        )


def _step_cost(load: node_pb2.Load) -> StepCost | None:
    cost = load.step_cost
    known = load.HasField("step_cost")
    return StepCost(cost.fixed, cost.row, cost.key, cost.token, cost.pair) if known else None


class RequestRouting:
    """The routing of one request."""

    def __init__(
        self,
        router: Router,
        number: int,
        prompt: PromptPages,
        preferred_decode: str = "",
        preferred_prefill: str = "",
    ) -> None:
        """number: of the request, counting up. preferred: see Router.load_of."""
        self._router = router
        self._number = number
        self._prompt = prompt
        self._preferred_decode = preferred_decode
        self._preferred_prefill = preferred_prefill
        self._at_decode: SentLoad | None = None
        self._at_prefill: SentLoad | None = None
        self._decision: Decision | None = None
        self._sent_at = 0.0
        self._loads: dict[str, NodeLoad] = {}
        """Loads of the nodes among which the last attempt was placed."""

    def pick_decode(self, addresses: Sequence[str]) -> str:
        """Chooses from at least one address."""
        nodes = self._look(addresses, self._preferred_decode)
        tokens = len(self._prompt.tokens)
        return pick_decode(self._router.policy, nodes, tokens, self._number, self._preferred_decode)

    def order_prefill(self, addresses: Sequence[str]) -> list[str]:
        nodes = [self._expected(node) for node in self._look(addresses, self._preferred_prefill)]
        tokens = len(self._prompt.tokens)
        return order_prefill(self._router.policy, nodes, tokens, self._number, self._preferred_prefill)

    def _look(self, addresses: Sequence[str], preferred: str) -> list[NodeLoad]:
        nodes = [self._router.load_of(address, self._prompt, preferred) for address in addresses]
        self._loads |= {node.address: node for node in nodes}
        return nodes

    def _expected(self, node: NodeLoad) -> NodeLoad:
        """With what it is expected to borrow from the others."""
        return with_borrowed(node, max((each.cached for each in self._holders()), default=0))

    def _holders(self) -> list[NodeLoad]:
        """All nodes that can be heard, also those that take no requests."""
        loads, router = self._loads, self._router
        each = [loads.get(a) or router.load_of(a, self._prompt, "") for a in router.reporting()]
        return sorted((node for node in each if node.cached), key=lambda node: -node.cached)

    def sources(self, decode: str, prefill: Sequence[str]) -> list[common_pb2.PromptSource]:
        """Nodes that hold more of the prompt than one that may compute it (`decode`, or the first of
        `prefill`). Most tokens first."""
        least = min(self._loads[address].cached for address in (decode, *prefill[:1]))
        found = [
            common_pb2.PromptSource(
                address=node.address,
                incarnation=self._router.view(node.address).incarnation,
                tokens=node.cached,
            )
            for node in self._holders()
            if node.cached > least
        ]
        return found[:MAX_SOURCES]

    def _uncached(self, address: str) -> int:
        """Tokens of the prompt that the node is predicted to compute."""
        return max(0, len(self._prompt.tokens) - self._expected(self._loads[address]).cached)

    def decide(
        self, split: Split, decode: str, prefill: Sequence[str], hand_off: bool | None = None
    ) -> int | None:
        """DecodeStart.local_prefill_tokens for an attempt at this decode node, with this order of prefill
        nodes. hand_off: the client's choice."""
        there = self._expected(self._loads[prefill[0]]) if prefill else None
        load, tokens = self._loads[decode], len(self._prompt.tokens)
        self._decision = decision = split.decide(self._expected(load), there, tokens, hand_off)
        if decision.limit is None or not decision.local:
            return decision.limit
        # The node counts what it will borrow among what it has to compute.
        return max(decision.limit, tokens - load.cached)

    def sent(self, decode: str, prefill: Sequence[str]) -> None:
        """The attempt has been sent."""
        self.ended()
        self._sent_at = self._router.clock()
        local = not prefill or (self._decision is not None and self._decision.local)
        self._at_decode = self._router.sent(decode)
        self._at_decode.add(self._number, self._uncached(decode) if local else 0, len(self._prompt.tokens))
        if not local:
            self._at_prefill = self._router.sent(prefill[0])
            self._at_prefill.add(self._number, self._uncached(prefill[0]))

    def computed(self) -> None:
        """The prompt of the attempt has been computed."""
        if self._at_decode is not None:
            self._at_decode.computed(self._number)
        if self._at_prefill is not None:
            self._at_prefill.drop(self._number)
            self._at_prefill = None

    def learn(self, split: Split, stats: decode_pb2.RequestStats, first: float) -> None:
        """The first attempt has finished; `first`: time of its first token on the clock."""
        if self._decision is not None:
            now = self._router.clock()
            split.ended(self._decision, stats, first - self._sent_at, now - self._sent_at)

    def ended(self) -> None:
        """The request has ended at every node. Idempotent."""
        self.computed()
        if self._at_decode is not None:
            self._at_decode.drop(self._number)
            self._at_decode = None

    def predicted(self, stats: decode_pb2.RequestStats, decode: str) -> int:
        """Predicted cached tokens of the node that computed the prompt."""
        node = self._loads.get(stats.prefill_address or decode)
        return node.cached if node is not None else 0
