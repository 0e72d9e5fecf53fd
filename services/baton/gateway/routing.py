"""Which nodes a request goes to: by what is known of them, pure.

`cache` estimates for each node when the request would have its first token there; the nodes whose trees hold
the prompt's beginning win by what they need not compute, until their queues are longer than that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.figures import NodeFigures

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
    policy: str, nodes: Sequence[NodeFigures], tokens: int, turn: int = 0, preferred: str = ""
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
    policy: str, nodes: Sequence[NodeFigures], tokens: int, turn: int, preferred: str = ""
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


def prefill_seconds(node: NodeFigures, tokens: int, rate: float) -> float:
    """Until a prompt of so many tokens would be computed there. rate: tokens a second, for a node that has
    measured none."""
    left = max(1, tokens - node.cached)
    return (node.queued_tokens + left) / (node.prompt_rate or rate) + _for_room(node)


def decode_seconds(node: NodeFigures, tokens: int) -> float:
    """What a decode node makes a prompt of so many tokens wait, and what it makes the others there wait."""
    pull = max(0, tokens - node.cached) / PULL_RATE
    rows = STEPS_PER_ROW * node.rows * (node.step or DEFAULT_STEP)
    return node.wait + pull + rows + _for_room(node)


def _for_room(node: NodeFigures) -> float:
    return NO_ROOM_SECONDS if node.known and node.needed_pages > node.free_pages else 0.0


def _prompt_rate(nodes: Sequence[NodeFigures]) -> float:
    """A rate for those that have measured none: the others' mean."""
    rates = [node.prompt_rate for node in nodes if node.prompt_rate]
    return sum(rates) / len(rates) if rates else DEFAULT_PROMPT_RATE
