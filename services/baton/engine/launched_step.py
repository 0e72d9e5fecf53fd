"""A step that has been launched."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch import DraftRound
from baton.engine.grammar_masks import Masks
from baton.engine.plan import PlanRow
from baton.engine.sampler import KernelSamples, Samples, TokenLogprobs


@dataclass(slots=True)
class PendingSampling:
    """The sampling of a step whose forward pass has been enqueued. Where a row has a grammar it may have to
    wait until the step before has been read."""

    logits: torch.Tensor
    """[samples, and those of the rounds, vocab]"""
    slots: npt.NDArray[np.int64]
    """[samples]: batch slots, of which none occurs twice."""
    positions: npt.NDArray[np.int64]
    """[samples]: of the tokens to be sampled."""
    masked: list[int]
    """Those of them that have a grammar."""
    rounds: list[DraftRound] = field(default_factory=list)
    masks: Future[Masks] | None = None
    """Their masks, where computing them has begun."""
    graph: int = 0
    """Rows of the decode graph that samples them; 0: none does."""
    simple: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """On the device, slots (int32), temperatures and generator states [samples, and those of the rounds], if
    these and masks are all that the sampling depends on."""


@dataclass(slots=True)
class LaunchedStep:
    """Its results, valid once `done` has occurred, and the rows they belong to."""

    number: int
    rows: tuple[PlanRow, ...]
    done: torch.cuda.Event | None = None
    """That the step has been computed, with its sampling; None on a CPU, where it has."""
    samples: Samples | KernelSamples | None = None
    """Of all sampling rows' slots, in the order of the plan or, with `places`, of the batch."""
    drafted: list[tuple[DraftRound, Samples | KernelSamples]] = field(default_factory=list)
    """What was sampled behind drafts; on a CPU only where they were right."""
    slots: list[int] = field(default_factory=list)
    """[samples]: their batch slots; with `drafted`."""
    places: list[int] | None = None
    """For a decode step whose rows were computed in another order: each row's index in it."""
    prompts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities, by the row's place in the plan."""
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)
    """float32 [hidden], of the rows with PlanRow.pooling, by their place in the plan."""
    masks: Masks | None = None
    """Masks of its rows with a grammar, whose matchers learn their tokens when it is read."""
    late: PendingSampling | None = None
    """Its sampling, which waits until the step before has been read. None: it is enqueued."""
    failed: Exception | None = None
    """Why it could not be."""
