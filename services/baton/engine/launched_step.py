"""A step that has been launched."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch import Ints
from baton.engine.chunk_graphs import ChunkShape
from baton.engine.grammar_masks import Masks
from baton.engine.plan import PlanRow
from baton.engine.sampler import KernelSamples, Samples, TokenLogprobs


@dataclass(slots=True)
class Chains:
    """Samples that follow on drafts: each counts if all drafts before it are right."""

    depths: Ints
    """[samples]: as in HostBatch."""
    drafts: torch.Tensor
    """int32 [wanted]: the tokens that are sampled behind, on the device."""
    positions: torch.Tensor
    """int32 [wanted]: theirs, likewise."""

    @property
    def firsts(self) -> Ints:
        """[samples]: where those that are wanted begin."""
        return np.cumsum(self.depths) - self.depths


@dataclass(slots=True)
class PendingSampling:
    """The sampling of a step whose forward pass has been enqueued. Where a row has a grammar it may have to
    wait until the step before has been read."""

    logits: torch.Tensor
    """[wanted, vocab]"""
    slots: npt.NDArray[np.int64]
    """[samples]: batch slots, of which none occurs twice."""
    positions: npt.NDArray[np.int64]
    """[samples]: of the tokens to be sampled; unknown with chains on a GPU."""
    masked: list[int]
    """Those of them that have a grammar."""
    chains: Chains | None = None
    """None: one token is sampled of each."""
    masks: Future[Masks] | None = None
    """Their masks, where computing them has begun."""
    graph: int = 0
    """Rows of the decode graph that samples them; 0: none does."""
    shape: ChunkShape | None = None
    """The chunk graph that does."""
    simple: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """On the device, slots (int32), temperatures and generator states [samples], if these and masks are all
    that the sampling depends on. With chains temperatures and `seed_keys` of all that are wanted."""


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device: results, valid once `done` has occurred, and the rows they belong to."""

    number: int
    rows: tuple[PlanRow, ...]
    done: torch.cuda.Event | None = None
    """That the step has been computed, with its sampling; None on a CPU, where it has."""
    samples: Samples | KernelSamples | None = None
    """Samples of all sampling rows' slots, in the order of the plan or, with `row_order`, of the batch; with
    `right` of all that are wanted."""
    more: list[Samples | KernelSamples] = field(default_factory=list)
    """Further log-probabilities and errors of these."""
    firsts: list[int] = field(default_factory=list)
    """[samples], with `right`: where those that are wanted begin."""
    right: torch.Tensor | None = None
    """int32 [samples], on the host: how many drafts were right; None: there were none."""
    verified: tuple[torch.Tensor, torch.Tensor] | None = None
    """With `right`, on the device: int32 [wanted], tokens as sampled, and int32 [samples], how many drafts
    were right. Valid until the next launch."""
    slots: Ints | None = None
    """[samples]: their batch slots, likewise."""
    row_order: list[int] | None = None
    """For a decode step whose rows were computed in another order: each row's index in it."""
    prompts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities, by the row's index in the plan."""
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)
    """float32 [hidden], of the rows with PlanRow.pooling, by their index in the plan."""
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    """RowResult.hidden of every row, by its index in the plan; of drafts as if all were right."""
    tapped: torch.Tensor | None = None
    """[tokens, values]: the hidden states of all rows, of which `hidden` are parts."""
    tapped_at: dict[int, int] = field(default_factory=dict)
    """Where those of each row begin, by its index in the plan."""
    encode_seconds: float = 0.0
    """StepResult.encode_seconds."""
    masks: Masks | None = None
    """Masks of its rows with a grammar, whose matchers learn their tokens when it is read."""
    late: PendingSampling | None = None
    """Sampling of the step, which waits until the step before has been read. None: it is enqueued."""
    failed: Exception | None = None
    """Why it could not be."""
