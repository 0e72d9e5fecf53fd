"""Which nodes a request goes to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decode node that could take a request now."""

    address: str
    requests: int
    """Requests that this gateway has running there."""


def pick_decode(
    candidates: Sequence[Candidate], preferred: str = "", excluded: Collection[str] = ()
) -> str | None:
    """The address of the node for a request; None if none is left.

    A session stays where its pages are (`preferred`); others go to the node with the fewest requests, the
    first of equals. Nodes that have failed the request before are `excluded`.
    """
    left = [candidate for candidate in candidates if candidate.address not in excluded]
    if any(candidate.address == preferred for candidate in left):
        return preferred
    fewest = min(left, key=lambda candidate: candidate.requests, default=None)
    return fewest.address if fewest is not None else None


def order_prefill(addresses: Sequence[str], turn: int, preferred: str = "") -> list[str]:
    """The prefill nodes in the order to try them.

    A session returns to the node that computed its last prompt (`preferred`), whose tree still holds it;
    otherwise requests take turns, so that each node is the first choice of as many as any other.
    """
    if not addresses:
        return []
    start = addresses.index(preferred) if preferred in addresses else turn % len(addresses)
    return [*addresses[start:], *addresses[:start]]
