"""Attention with grouped queries: Ainslie et al., GQA, arXiv:2305.13245."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from baton.layers.batch import Batch
from baton.layers.cache_spec import CacheSpec, attention_cache
from baton.layers.linear import Linear
from baton.layers.norm import add_one
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, apply_rope, half_split
from baton.layers.tensor_parallel import times

if TYPE_CHECKING:
    from baton.layers.mla import MlaProjections


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a layer's attention does beside softmax(q k^T / sqrt(head_dim)) v over all earlier positions."""

    scale: float | None = None
    """Scale of the attention scores, instead of 1 / sqrt(head_dim)."""
    window: int | None = None
    """A token sees this many positions, the last of them its own; None: all."""
    chunk: int | None = None
    """A token sees the positions from the last multiple of this on, its own the last of them; None: all."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""
    sinks: torch.Tensor | None = None
    """[heads]: of each head a score that takes part in the softmax and has no value."""
    latent: MlaProjections | None = None
    """What the pool holds are latents, of which keys and values are made."""
    kv_scales: torch.Tensor | None = None
    """float32 [2, kv heads]: the pool holds keys and values in FP8, divided by these."""
    top_k: int | None = None
    """A token attends to so many positions at most: `layers.sparse_mla`."""

    @property
    def features(self) -> frozenset[str]:
        """The options in use, by name."""
        names = ("scale", "window", "chunk", "softcap", "sinks", "latent", "kv_scales", "top_k")
        found = frozenset(name for name in names if getattr(self, name) is not None)
        # FlashAttention 3 has not been tried with both.
        return found | {"sinks and kv_scales"} if found >= {"sinks", "kv_scales"} else found


NONE = AttentionOptions()


class AttentionModule(ABC):
    """A projection, attention over the paged pool, output projection."""

    index: int
    """Index of the layer whose keys and values it reads."""
    rope: Rope
    cache: CacheSpec | None
    """None: it writes none, and reads those of a layer before it."""
    options: AttentionOptions
    input: Linear
    output: Linear

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.output(self._attend(x, batch))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """residual + the same; `residual` may be overwritten."""
        return self.output.add_to(residual, self._attend(x, batch))

    @abstractmethod
    def _attend(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, inputs of `output`]"""


class WritingAttention(AttentionModule):
    """Writes keys and values of its own."""

    cache: CacheSpec

    def _attend(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._attend_with(self.input(x), batch)

    def _attend_with(self, projected: torch.Tensor, batch: Batch) -> torch.Tensor:
        if batch.caches:
            return self.attend(batch, self.write(projected, batch))
        return batch.attention.write_and_attend(self.index, *self.split(projected, batch))

    @abstractmethod
    def split(self, projected: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `input` has projected -> rotated queries, rotated keys and values for `StepAttention`."""

    @abstractmethod
    def write(self, projected: torch.Tensor, batch: Batch) -> torch.Tensor:
        """On a GPU, with kernels: the same, but keys and values go into the pool -> queries."""

    @abstractmethod
    def attend(self, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        """On a GPU, with what `write` returned -> [tokens, inputs of `output`]"""


class Attention(WritingAttention):
    """Projections, norms of each head, rotation, attention over the paged pool, output projection."""

    def __init__(
        self,
        parameters: Parameters,
        index: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        norm_eps: float | None = None,
        norm_plus_one: bool = False,
        options: AttentionOptions = NONE,
        merged: str | None = None,
        values: bool = True,
        gated: bool = False,
        interleaved: bool = False,
        norm_weights: bool = True,
        inputs: int = 0,
    ) -> None:
        """`norm_eps`: queries and keys of each head are normalized; `merged`: the checkpoint's name for
        queries, keys and values in one tensor; `values` false: they are not projected, and whoever calls
        `split` and `write` adds them; `gated`: what comes out is multiplied by the sigmoid of a gate, which
        q_proj has behind each head's queries; `interleaved`: the checkpoint's rotation pairs neighbours;
        `norm_weights` false: the norms of heads have none; `inputs`: values of a token that are projected,
        0: `hidden`."""
        shard = parameters.shard
        head_range, own_kv = shard.split(heads, "attention heads"), shard.kv_heads(kv_heads)
        self.index, self.rope, self.head_dim = index, rope, head_dim
        self.heads, self.kv_heads = head_range[1], own_kv[1]
        """Heads of this rank."""
        self.options = options
        self.cache = attention_cache(options.window, kv_heads, head_dim, chunk=options.chunk)
        q, kv = heads * head_dim, kv_heads * head_dim
        parts = {merged: q + 2 * kv} if merged else {"q_proj": q, "k_proj": kv}
        if values and not merged:
            parts["v_proj"] = kv
        queries, keys = times(head_range, head_dim), times(own_kv, head_dim)
        rows = {name: [queries if name == "q_proj" else keys] for name in parts}
        convert = None
        if interleaved:
            convert = dict.fromkeys(("q_proj", "k_proj"), half_split(head_dim, 0))
        self.gated = gated
        if gated:
            parts["q_proj"], rows["q_proj"] = 2 * q, [times(head_range, 2 * head_dim)]
            convert = {"q_proj": partial(_gates_first, head_dim)}
        if merged:
            rows = {merged: [queries, times(own_kv, head_dim, q), times(own_kv, head_dim, q + kv)]}
        self.input = parameters.linear(parts, inputs or hidden, qkv_bias, convert, rows=rows)
        self.output = parameters.linear({"o_proj": hidden}, q, output_bias, columns=queries)
        self.qk_norm: torch.Tensor | None = None
        """[heads + kv heads, head_dim]: the weight of each head's norm."""
        self.norm_eps = norm_eps or 0.0
        if norm_eps is not None:
            self.qk_norm = parameters.empty(self.heads + self.kv_heads, head_dim).fill_(1)
        if self.qk_norm is not None and norm_weights:
            of_queries, of_keys = torch.split(self.qk_norm, [self.heads, self.kv_heads])
            for name, part in (("q_norm", of_queries), ("k_norm", of_keys)):
                parameters.add(
                    f"{name}.weight",
                    part,
                    shape=torch.Size([head_dim]),
                    fill="zeros" if norm_plus_one else "ones",
                    convert=add_one if norm_plus_one else None,
                )

    def _attend(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self.gated:
            return super()._attend(x, batch)
        width = self.heads * self.head_dim
        projected = self.input(x)
        if batch.caches:
            return self._attend_with(projected, batch)
        gates, qkv = projected[:, :width], projected[:, width:]
        return self._attend_with(qkv, batch).mul_(gates.sigmoid())

    def split(self, projected: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, rotated = self.heads, self.heads + self.kv_heads
        qkv = projected.view(projected.shape[0], rotated + self.kv_heads, self.head_dim)
        qk = qkv[:, :rotated]
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), None, self.norm_eps).mul_(self.qk_norm)
        qk = apply_rope(qk, *batch.rotation(self.rope))
        return qk[:, :heads], qk[:, heads:], qkv[:, rotated:]

    def write(self, projected: torch.Tensor, batch: Batch) -> torch.Tensor:
        """One kernel. -> queries [tokens, heads, head_dim], behind gates of that shape if it is gated"""
        from baton.layers.kernels.rope_kv_write import write_qkv

        positions, slots, nan_flags, cache = batch.where(self.index)
        where = positions, slots, nan_flags, cache.tables, cache.pages
        (table, turns), scales = batch.kernel_rotation(self.rope), self.options.kv_scales
        norm_options = self.heads, self.norm_eps, scales
        qkv = projected[:, self.heads * self.head_dim :] if self.gated else projected
        write_qkv(qkv, self.qk_norm, table, *where, *norm_options, turns=turns)
        return projected.view(len(projected), -1, self.head_dim)[:, : self.heads * (1 + self.gated)]

    def attend(self, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        gates, q = q[:, : -self.heads], q[:, -self.heads :]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        batch.attention.attend(self.index, q, out)
        if self.gated:
            from baton.layers.kernels.activation import open_by

            open_by(out, gates)
        return out.flatten(1)


def _gates_first(head_dim: int, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of [head, (query, gate), value] -> all gates, then all queries."""
    heads = tensor.view(-1, 2, head_dim, *tensor.shape[1:])
    return torch.cat((heads[:, 1], heads[:, 0])).view(tensor.shape)
