"""What a gateway knows of a node when it decides where a request goes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.handoff.pull_cost import PullCost
from baton.stepcost import StepCost


@dataclass(frozen=True, slots=True)
class NodeFigures:
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
