"""A step's batch, as the layers of a model see it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from baton.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class StateRun:
    """Consecutive tokens of one sequence, or equally many of each of several, through which states go on."""

    tokens: slice | torch.Tensor
    """Where they are in the step: int64 [rows * tokens of each]."""
    rows: int
    """Sequences."""
    reads: torch.Tensor
    """int64 [rows]: the pages that hold the states before the tokens; any page of a sequence that begins."""
    writes: torch.Tensor | None
    """int64 [rows]: where the states behind the tokens belong. None: the tokens are drafts, of which nobody
    knows yet whether they are right. Their inputs are kept for `slots`, until the step that finds out."""
    begins: torch.Tensor | None = None
    """bool [rows]: nothing is before the tokens; None: of none."""
    slots: torch.Tensor | None = None
    """int64 [rows]: batch slots, where there are drafts or `replay`."""
    replay: int = 0
    """So many of the inputs that were kept for each slot go through the state first: right drafts of the
    row before."""


PIECE = 64
"""Tokens of a piece, at most."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """A step's rows, as kernels take states through them."""

    singles: int
    """Rows of one token, which come first."""
    pieces: torch.Tensor | None = None
    """int32 [pieces, 4]: the longer rows in pieces of at most PIECE tokens: a piece's first token in the
    step, its tokens, the first token of its row, and whether the state behind it is kept. None: there are
    none."""
    starts: torch.Tensor | None = None
    """int32 [rows + 1]: each longer row's first piece."""
    one_by_one: bool = False
    """States take in a token after the other, so that their bits do not depend on how a sequence is divided
    into rows; all rows are then in pieces, those of one token, too."""


class StateLocations(NamedTuple):
    """Where the states of a step's tokens are: that behind position p of a slot in page tables[slot, p //
    page_size]."""

    tables: torch.Tensor
    """int32 [slots, pages], of the layer's group."""
    slots: torch.Tensor
    """int32 [tokens]"""
    positions: torch.Tensor
    """int32 [tokens]"""
    page_size: int


class StateCache(NamedTuple):
    """Where a recurrent layer's own kernels read and write states, on the device."""

    tables: torch.Tensor
    """int32 [slots, pages]: page tables of the layer's group, by batch slot."""
    tensors: Sequence[torch.Tensor]
    """float32 [pages, *shape] each."""
    page_size: int


class StepAttention(Protocol):
    """Attention of all layers over one step's rows: `attention.step.PlannedAttention`."""

    def write_and_attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes a layer's keys and values of all tokens into the pool and attends. q
        [tokens, heads, head_dim], k and v [tokens, kv heads, head_dim] -> [tokens, heads * head_dim]."""
        ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes likewise, for a layer whose output nobody wants. Not of latents."""
        ...

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """q [tokens, heads, head_dim] into `out` of that shape, once the layer's keys and values are in the
        pool. Of latents: absorbed queries [tokens, heads, rank + rotated], weighted latents
        [tokens, heads, rank]."""
        ...

    def states(self, layer: int) -> tuple[Sequence[StateRun], Sequence[torch.Tensor]]:
        """What a recurrent layer needs: the step's runs, in the order in which they are to be computed, and
        the tensors of its state in all pages, float32 [pages, *shape]."""
        ...


@dataclass(slots=True)
class HiddenTap:
    """Hidden states that a forward pass leaves for whoever wants them beside the final ones."""

    layers: tuple[int, ...]
    """Before which layers, ascending: 0 means the embeddings, the number of layers what the last one has
    made. FINAL: the normalized states that the head gets."""
    found: dict[int, torch.Tensor] = field(default_factory=dict)
    """Hidden states before each of `layers` that the model has, [tokens, hidden]."""

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Keeps them if they are wanted; `hidden` may be overwritten afterwards."""
        if layer in self.layers:
            self.found[layer] = hidden.clone()


FINAL = sys.maxsize
"""In `HiddenTap.layers`."""


class LayerCache(NamedTuple):
    """Where a layer's own kernels write keys and values, on the device."""

    tables: torch.Tensor
    """int32 [slots, pages]: page tables of the layer's KV group, by batch slot."""
    pages: torch.Tensor
    """[pages, kv heads, parts, page_size, dim]"""


@dataclass(frozen=True, slots=True)
class InputEmbeddings:
    """What tokens are embedded as in place of their ids' rows, such as those of images."""

    at: torch.Tensor
    """int64 [n]: indices of the tokens in the step."""
    rows: torch.Tensor
    """[1 + k, n, hidden]: the embeddings, and what is added to the hidden states behind each of the first k
    layers (DeepStack: Meng et al., arXiv:2406.04334)."""


@dataclass(slots=True)
class Batch:
    """The tokens of all rows of a step, one row behind the other, those of one token first.

    In a CUDA graph its tensors are buffers that each replay finds filled.
    """

    tokens: torch.Tensor
    """Ids, int [tokens]"""
    positions: torch.Tensor
    """int [tokens]"""
    attention: StepAttention
    caches: Sequence[LayerCache | StateCache] = ()
    """Where each layer's own kernels write into the pool; empty: `attention` writes."""
    slots: torch.Tensor | None = None
    """int32 [tokens]: their batch slots; with `caches`."""
    nan_flags: torch.Tensor | None = None
    """float32 [slots]: becomes NaN where values that are written are no numbers, or infinite; latents are not
    looked at. With `caches`."""
    logits_indices: torch.Tensor | None = None
    """int [n]: the tokens whose final hidden states are wanted; None: all."""
    few: bool = False
    """Rows of one token, or with a few drafts."""
    axes: torch.Tensor | None = None
    """int [axes, tokens]: positions of the rotation, where an image has shifted them; None: `positions`."""
    turns: torch.Tensor | None = None
    """int32 [tokens]: the same for layers' own kernels, of tokens that are none of an image."""
    embeddings: InputEmbeddings | None = None
    tap: HiddenTap | None = None
    states: StateRows | None = None
    """With `caches`, for kernels of recurrent layers; None: these go by `StepAttention.states`."""
    _rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the positions, [tokens, 1, rotary dim] each; computed once a step."""
        found = self._rotations.get(id(rope))
        if found is None:
            found = rope.at(self.positions) if self.axes is None else rope.at_axes(self.axes)
            self._rotations[id(rope)] = found
        return found

    def kernel_rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For kernels: a table as `Rope.kernel_table`, and each token's row of it; None: its position."""
        if self.axes is None:
            return rope.kernel_table, self.turns
        found = self._rotations.get(id(rope))
        if found is None:
            rows = torch.arange(self.axes.shape[1], dtype=torch.int32, device=self.axes.device)
            found = rope.kernel_rows(self.axes), rows
            self._rotations[id(rope)] = found
        return found

    def chosen(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> those of the tokens that are wanted."""
        return states if self.logits_indices is None else states.index_select(0, self.logits_indices)

    def where(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LayerCache]:
        """For a layer's own kernels: positions, slots, damage, and the layer's cache."""
        cache = self.caches[layer]
        assert self.slots is not None and self.nan_flags is not None and isinstance(cache, LayerCache)
        return self.positions, self.slots, self.nan_flags, cache

    def state(self, layer: int) -> tuple[Sequence[torch.Tensor], StateLocations]:
        """For a recurrent layer's own kernels: the tensors of its states, and where they are."""
        cache = self.caches[layer]
        assert self.slots is not None and isinstance(cache, StateCache)
        return cache.tensors, StateLocations(cache.tables, self.slots, self.positions, cache.page_size)
