"""Rotary position embedding: Su et al., RoFormer, arXiv:2104.09864, in the half-split form of Llama."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Rope:
    """Frequencies and scale of the rotation of the first `dim` values of a head."""

    def __init__(
        self, frequencies: torch.Tensor, scale: float = 1.0, axes: torch.Tensor | None = None
    ) -> None:
        """`frequencies`: radians per position of each of the dim / 2 pairs, float32; `scale` multiplies
        cosine and sine. `axes`: int [dim / 2], the axis of positions that turns each pair, where positions
        may have several (time, height, width); text has the same on all."""
        self.frequencies = frequencies.to("cpu", torch.float32)
        self.scale = scale
        self.dim = 2 * len(frequencies)
        self._axes = None if axes is None else torch.cat((axes, axes))
        self._table: torch.Tensor | None = None
        self._kernel_table: torch.Tensor | None = None

    def table(self, positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Cosines and sines of the first positions for `apply_rope`: [positions, 2, dim], computed in
        float32."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.frequencies)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return table.to(device=device, dtype=dtype)

    def prepare_kernels(self, positions: int, device: torch.device) -> None:
        """Computes `kernel_table`."""
        table = self.table(positions, torch.float32, device)
        half = self.dim // 2
        # The sines of the second half are the positive ones.
        self._kernel_table = torch.cat((table[:, 0, :half], table[:, 1, half:]), 1).contiguous()

    @property
    def kernel_table(self) -> torch.Tensor:
        """For kernels: float32 [positions, dim], the cosines of the pairs, then their sines."""
        assert self._kernel_table is not None
        return self._kernel_table

    def kernel_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """`kernel_table` for tokens at int [axes, tokens]: float32 [tokens, dim]"""
        assert self._axes is not None
        return self.kernel_table.gather(0, positions.index_select(0, self._axes).t().long())

    def prepare(self, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Computes the table that `at` looks up."""
        self._table = self.table(positions, dtype, device)
        self._axes = None if self._axes is None else self._axes.to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of int [tokens], each [tokens, 1, dim]."""
        assert self._table is not None
        cos, sin = self._table.index_select(0, positions).unsqueeze(2).unbind(1)
        return cos, sin

    def at_axes(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `at` gives, for positions int [axes, tokens]."""
        assert self._table is not None and self._axes is not None
        rows = positions.index_select(0, self._axes).t()  # [tokens, dim]
        cos, sin = (part.gather(0, rows.long()).unsqueeze(1) for part in self._table.unbind(1))
        return cos, sin


def rope_of(hf: Any, context_length: int, layer_type: str | None = None) -> Rope:
    """From a configuration of transformers, by transformers' own functions.

    `context_length`: positions that will be used: "longrope" chooses its factors by it. `layer_type`: where
    kinds of layers rotate differently. Raises ValueError for a kind that transformers does not know.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf.standardize_rope_params()
    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        heads_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        dim = int(heads_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return Rope(1.0 / parameters["rope_theta"] ** exponents)
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        raise ValueError(f"rope_type {kind!r} is not supported; supported are {known}")
    # "dynamic" changes nothing within max_position_embeddings, and no context is longer.
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, None, seq_len=context_length, layer_type=layer_type)
    return Rope(frequencies, float(scale))


def interleaved_axes(pairs: int, sections: Sequence[int]) -> torch.Tensor:
    """Axis of each of a head's pairs, int64 [pairs], as Qwen3-VL interleaves them: time, height, width in
    turn as long as `sections` (pairs of each axis) has some of an axis left, then time."""
    axes = torch.zeros(pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def no_rotation() -> Rope:
    """For layers without positions: rotates the first two values of a head by nothing."""
    return Rope(torch.zeros(1))


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first values of each head of x [tokens, heads, head_dim], as many as cos and sin
    [tokens, 1, dim] have; the first half of `sin` is negative, so that it multiplies the swapped halves."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :dim], cos, sin), x[..., dim:]), -1)
    return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)


def half_split(size: int, start: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Conversion of a projection, whose rotation pairs neighbours (2i, 2i + 1), to one that pairs halves:
    reorders the rows from `start` on of each head of `size` rows, in its weight or bias. Scores do not change
    where queries and keys are both reordered."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        heads = tensor.view(-1, size, *tensor.shape[1:])
        rotated = heads[:, start:]
        return torch.cat((heads[:, :start], rotated[:, ::2], rotated[:, 1::2]), 1).view(tensor.shape)

    return convert
