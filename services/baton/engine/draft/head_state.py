"""What a drafter with a head keeps of a sequence, and what a step does of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from baton.engine.draft.kv_slots import DraftKv
from baton.engine.request import Sequence as TokenSequence


@dataclass(slots=True, eq=False)
class HeadState:
    """What the drafter keeps of a sequence."""

    sequence: TokenSequence
    kv: DraftKv | None = None
    pairs: int = 0
    """Whose keys and values the pages hold."""
    seen: int = 0
    """Position behind the last hidden states that came."""
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """First position and hidden states, not computed yet."""
    last: torch.Tensor | None = None
    """The head's hidden states [hidden] at the last pair, which predict what follows its token."""
    behind: int = 0
    """Position that they predict."""
    asked: int = 0
    """The last step that drafts were wanted in."""
    going: int = -1
    """Position from which on the device takes pairs of a step that has not been read, and drafts behind them;
    -1: it does not."""

    @property
    def lost(self) -> bool:
        return self.kv is None or self.kv.slot < 0

    def skip(self, position: int) -> None:
        """Hidden states before it are not waited for any more."""
        waiting, self.waiting = self.waiting, []
        for start, hidden in waiting:
            known = max(0, position - start)
            if known < len(hidden):
                self.waiting.append((start + known, hidden[known:]))


@dataclass(slots=True, eq=False)
class HeadWork:
    """A sequence's part of the first pass."""

    state: HeadState
    kv: DraftKv
    drafts: int
    positions: list[int]
    hidden: list[torch.Tensor]

    def split(self, last: int) -> HeadWork:
        """Leaves it so many of its pairs at most, the last ones, which are the only ones that drafts are
        wanted behind; -> those before them."""
        count = max(0, len(self.positions) - last)
        whole = torch.cat(self.hidden) if len(self.hidden) > 1 else self.hidden[0]
        before = HeadWork(self.state, self.kv, 0, self.positions[:count], [whole[:count]])
        self.positions, self.hidden = self.positions[count:], [whole[count:]]
        return before
