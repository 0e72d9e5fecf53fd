"""The interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from baton.engine.request import Sequence as TokenSequence

if TYPE_CHECKING:
    from baton.engine.launched_step import LaunchedStep


class Drafter(ABC):
    """Guesses how sequences go on. Used by the step thread; may keep state in `sequence.drafting`, which ends
    with the sequence."""

    name = ""
    """Name of the drafter's kind in metrics."""
    computes = False
    """Whether a guess takes a noticeable part of a step's time."""
    tap: tuple[int, ...] = ()
    """Hidden states that `observe` wants: see `layers.batch.HiddenTap.layers`."""
    guesses: torch.Tensor | None = None
    """int32, on the device: guesses that the host does not know. `draft` names them as PlanRow.drafts does,
    for the step that it is asked for."""

    def prepare(self, limits: Sequence[tuple[TokenSequence, int]]) -> None:  # noqa: B027
        """Called before the `draft`s of a step, with the sequences that will be asked for and the most tokens
        of each: a drafter that computes does so for all at once. The others do nothing."""

    def observe(self, sequence: TokenSequence, start: int, hidden: torch.Tensor) -> None:  # noqa: B027
        """Called for a drafter that reads the model's hidden states, with those [tokens, values] of the
        sequence's tokens from `start` on. They have been computed for good."""

    def follow(self, launched: LaunchedStep) -> None:  # noqa: B027
        """Called when a step with drafts is under way, before it is read: a drafter that computes may enqueue
        what follows on it. Must not raise."""

    @abstractmethod
    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        """The tokens that are likely to follow `sequence.tokens`, `most` at most; empty: no guess. Must not
        block: a step waits for it."""
