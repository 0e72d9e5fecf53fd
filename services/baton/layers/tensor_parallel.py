"""Tensor parallelism, after Megatron-LM (Shoeybi et al., arXiv:1909.08053): which part of each tensor a rank
holds, and what ranks tell each other.

Projections into heads and into a feed-forward layer's inner values are cut by outputs, those out of them by
inputs; the partial products are summed over all ranks: two sums a layer. Embedding and head are cut by the
vocabulary. KV heads fewer than ranks are held by several of them, latents by all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from baton.model_path import CheckpointError

if TYPE_CHECKING:  # the simulator, which loads no torch, divides heads too
    import torch

IndexRange = tuple[int, int]
"""First and number of neighbours along an axis."""


class Communicator(Protocol):
    """What the layers of one worker's ranks tell each other. All ranks make the same calls in the same order;
    each call has a time limit, after which it raises."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; the same bits everywhere."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, n] -> on rank 0 [rows, n * ranks], in the order of the ranks; on others [rows, 0]"""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's contents, in place."""
        ...

    def check(self) -> None:
        """Raises if a call has failed that was only enqueued, and has run."""
        ...


class DeviceCommunicator(Communicator, Protocol):
    """Collectives among ranks on GPUs."""

    def add_norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> None:
        """`layers.kernels.gemm.add_norm` of the parts of all ranks: their sums are rounded, as is the sum of
        those. `bias`: on rank 0."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part of a checkpoint's tensor that one rank holds."""

    axis: int
    spans: tuple[IndexRange, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [tensor.narrow(self.axis, first, count) for first, count in self.spans]
        if len(parts) == 1:
            return parts[0]
        import torch

        return torch.cat(parts, self.axis)

    def shape(self, whole: torch.Size) -> torch.Size:
        sizes = list(whole)
        sizes[self.axis] = sum(count for _, count in self.spans)
        return type(whole)(sizes)


Cuts = Mapping[str, TensorSlice]
"""By the names of tensors."""
NO_CUTS: Cuts = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of how many ranks, which are divided evenly among hosts: the first ones are on the first host."""

    rank: int = 0
    size: int = 1
    hosts: int = 1
    ep: bool = False
    """Each rank holds some of a mixture's experts whole, instead of a part of each."""

    @property
    def per_host(self) -> int:
        return self.size // self.hosts

    @property
    def host(self) -> int:
        """Host of this rank, counted from 0."""
        return self.rank // self.per_host

    @property
    def first_of_host(self) -> bool:
        return self.rank % self.per_host == 0

    def split(self, count: int, what: str) -> IndexRange:
        """This rank's equal part. Raises CheckpointError if there is none, naming `what`."""
        if count % self.size:
            raise CheckpointError(
                f"{count} {what} cannot be divided among {self.size} ranks; use --tp with a divisor of them"
            )
        per_rank = count // self.size
        return per_rank * self.rank, per_rank

    def kv_heads(self, count: int) -> IndexRange:
        """Splits KV heads; ranks that outnumber the heads hold one each, so that neighbours hold the same."""
        if self.size % count == 0:
            return self.rank * count // self.size, 1
        return self.split(count, "KV heads")

    def host_kv_heads(self, count: int) -> IndexRange:
        """KV heads of all ranks of this rank's host."""
        first, _ = replace(self, rank=self.host * self.per_host).kv_heads(count)
        last, per_rank = replace(self, rank=(self.host + 1) * self.per_host - 1).kv_heads(count)
        return first, last + per_rank - first

    def keeps(self, kv_heads: int) -> bool:
        """Whether no rank before this one on its host holds the same KV heads."""
        if self.size % kv_heads != 0 or self.first_of_host:
            return True
        return self.rank % (self.size // kv_heads) == 0

    def vocabulary(self, count: int) -> IndexRange:
        """This rank's rows of the vocabulary; those of the last rank may be fewer than `vocabulary_rows`."""
        rows = self.vocabulary_rows(count)
        first = min(rows * self.rank, count)
        return first, min(rows, count - first)

    def vocabulary_rows(self, count: int) -> int:
        return -(-count // self.size)

    def cut(self, axis: int, *spans: IndexRange) -> TensorSlice | None:
        """None: the tensor is whole, because there is one rank."""
        return TensorSlice(axis, spans) if self.size > 1 else None


ONE_RANK = Shard()


def times(span: IndexRange, each: int, offset: int = 0) -> IndexRange:
    """The span of what makes up these neighbours, `each` of it one, from `offset` on."""
    return offset + span[0] * each, span[1] * each
