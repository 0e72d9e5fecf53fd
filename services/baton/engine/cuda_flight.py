"""A step that has been launched on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from baton.engine.grammar_masks import Masks
from baton.engine.plan import PlanRow
from baton.engine.sampler import Samples, TokenLogprobs


@dataclass(slots=True)
class CudaFlight:
    """A launched step: its results, in pinned memory once `done` has occurred, and their rows."""

    number: int
    rows: tuple[PlanRow, ...]
    done: torch.cuda.Event
    result: torch.Tensor | None = None
    """int32 [sampled slots, 2]: the token, and the bits of the largest logit."""
    places: list[int] | None = None
    """For a decode step whose rows were computed in another order: each row's index in it, by which all
    of its samples are counted."""
    samples: Samples | None = None
    """Samples whose log-probabilities are needed too."""
    prompts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)
    """float32 [hidden], of the rows with PlanRow.pooling, by their place in the plan."""
    masks: Masks | None = None
    """Masks of its rows with a grammar, whose matchers learn their tokens when it is read."""
    late: Callable[[], None] | None = None
    """Enqueues its sampling, once the step before it has been read. None: it is enqueued."""
    failed: Exception | None = None
    """Why it could not be."""

    def sample_late(self) -> None:
        """Enqueues the sampling that waited for the tokens now read."""
        if self.late is None:
            return
        try:
            self.late()
            self.done.record()
        except Exception as error:
            self.failed = error
        self.late = None
