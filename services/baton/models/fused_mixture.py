"""A mixture of experts on a GPU's kernels, as `fused_layer` uses it. Needs a GPU: import it where one is in
use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sgl_kernel import silu_and_mul

from baton.layers.kernels import moe_grouped_gemm, moe_small_batch
from baton.layers.kernels.activation import weighed
from baton.layers.kernels.batch_invariant_matmul import matmul
from baton.layers.kernels.gemm import MOST_ROWS, fits, project_parts
from baton.layers.kernels.gemv import gemv
from baton.layers.kernels.moe_align import COUNTED_PAIRS, choose, sort
from baton.layers.kernels.moe_gate import score
from baton.layers.kernels.moe_grouped_gemm import GroupedTile
from baton.layers.kernels.quantize import Quantized, quantize
from baton.layers.kernels.rmsnorm import rmsnorm
from baton.layers.mlp import GatedMlp
from baton.layers.moe import GatedExpert, Mixture

FEW_TOKENS = 4
"""So many rarely share an expert: each reads its own."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of a tile, and the tiles of both products."""

    rows: int
    gate_up: GroupedTile
    down: GroupedTile


SIZES = {
    12: Sizes(16, GroupedTile(64, 128, 4, 3), GroupedTile(64, 128, 4, 3)),
    24: Sizes(32, GroupedTile(64, 128, 4, 4), GroupedTile(64, 128, 4, 3)),
    96: Sizes(64, GroupedTile(64, 64, 4, 3), GroupedTile(128, 64, 4, 3)),
}
"""Up to so many tokens an expert, on average. The best of 40 tiles a product, on an H200, for 128 experts of
2,048 and 768, 8 a token: 64 tokens 192 + 104 us (4.1 and 3.8 TB/s), 512 tokens 208 + 117, 2,048 tokens
290 + 170, 8,192 tokens 783 + 425 us (527 and 485 TFLOP/s)."""
LARGE = Sizes(128, GroupedTile(128, 64, 8, 3), GroupedTile(128, 64, 4, 3))
SIZES_8 = {
    12: Sizes(16, GroupedTile(128, 128, 4, 3), GroupedTile(128, 128, 4, 3)),
    24: Sizes(32, GroupedTile(128, 128, 8, 3), GroupedTile(64, 128, 4, 4)),
}
LARGE_8 = Sizes(128, GroupedTile(128, 128, 8, 4), GroupedTile(128, 128, 8, 4))
"""Tiles for many tokens where both operands have 8 bits: tiles are blocks. 64 tokens 163 us with the
router, 256 tokens 106 + 69, 4,096 tokens 249 + 260."""
INVARIANT = Sizes(64, GroupedTile(64, 64, 4, 4), GroupedTile(128, 64, 4, 4))
"""Always the same, so that the number of rows has no say in the order of adding up."""


class FusedMixture:
    def __init__(self, mixture: Mixture, invariant: bool = False) -> None:
        shared = mixture.shared
        self._gate: torch.Tensor | None = None
        """[1, hidden]: a gate's weight, whose sigmoid weighs the shared layer."""
        if isinstance(shared, GatedExpert):
            self._gate, shared = shared.gate.weight, shared.mlp
        assert shared is None or isinstance(shared, GatedMlp)
        self._router, self._experts, self._shared = mixture.router, mixture.experts, shared
        self._top_k = mixture.router.routing.top_k
        self._invariant = invariant
        self._joined = (
            shared if shared is not None and moe_small_batch.joins(shared, mixture.experts) else None
        )
        """The shared layer, where it is computed with the experts of one to a few tokens."""
        self._splits = not invariant and fits(mixture.router.linear)
        self._eight = not invariant and moe_grouped_gemm.fits(mixture.experts)
        """Whether activations of more than a few tokens have 8 bits, as the weights have."""

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], at least one -> [parts, tokens, hidden], to be added up by `gemm.add_norm`."""
        tokens, hidden = x.shape
        experts, top_k = self._experts, self._top_k
        few = not self._invariant and tokens <= FEW_TOKENS
        routed = 1 if few else top_k
        separate = self._shared is not None and not (few and self._joined is not None)
        # What other ranks' experts give is left out by all but the kernels for a few tokens.
        new = torch.empty if few or experts.count == experts.total else torch.zeros
        out = new(routed + separate, tokens, hidden, dtype=x.dtype, device=x.device)
        counts = None
        if tokens * top_k > COUNTED_PAIRS:
            counts = torch.zeros(experts.total, dtype=torch.int32, device=x.device)
        weights, chosen = choose(self._router, self._scores(x), counts=counts)
        if experts.first:
            chosen -= experts.first
        if counts is not None:
            counts = counts[experts.first : experts.first + experts.count]
        if few:
            inner = moe_small_batch.gate_up(x, self._router, experts, chosen, self._joined, self._gate)
            moe_small_batch.down(inner, experts, weights, chosen, out[0], self._joined)
        else:
            sizes = INVARIANT if self._invariant else sizes_for(tokens * top_k, experts.total, self._eight)
            tiles = sort(chosen, experts.count, sizes.rows, counts=counts)
            sorted_inner = moe_grouped_gemm.gate_up(
                self._quantized(x) if self._eight else x, experts, tiles, top_k, sizes.gate_up
            )
            moe_grouped_gemm.down(sorted_inner, experts, weights, tiles, out[:top_k], sizes.down)
        if separate:
            self._project_shared(x, out[-1])
        return out

    def add_one(self, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> None:
        """residual [1, hidden] += the layer's output for it, normalized with `norm` [hidden]."""
        alone = self._shared is not None and self._joined is None
        if self._router.routing.groups > 1 or (alone and self._gate is not None):
            residual.add_(self.parts(rmsnorm(residual, norm, eps)).sum(0))
            return
        logits = torch.empty(1, self._experts.count, dtype=torch.float32, device=residual.device)
        gemv(residual, self._router.linear, logits, norm=norm, eps=eps)
        shared, inner = self._shared if self._joined is None else None, residual
        if shared is not None:
            inner = residual.new_empty(1, shared.inner)
            gemv(residual, shared.gate_up, inner, norm=norm, eps=eps, gated=True)
        activated, weights, chosen = moe_small_batch.gate_up_one(
            residual, norm, eps, logits, self._router, self._experts, self._joined, self._gate
        )
        moe_small_batch.down(activated, self._experts, weights, chosen, residual, self._joined, add=True)
        if shared is not None:
            gemv(inner, shared.down, residual, add=True)

    def _quantized(self, x: torch.Tensor) -> Quantized:
        matrix, _ = self._experts.matrices()
        return quantize(x, matrix.values.dtype, matrix.scaled == "blocks")

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        """Without the bias, in parts to be added: [parts, tokens, experts]"""
        linear = self._router.linear
        weight = linear.weight
        assert weight is not None
        if self._splits and len(x) <= MOST_ROWS:
            return project_parts(x, linear)
        if self._invariant and weight.dtype == x.dtype and linear.bias is None:
            return matmul(x, linear)[None]
        if weight.dtype == torch.float32 and not self._invariant:
            return score(x, weight)
        return F.linear(x.to(weight.dtype), weight)[None]

    def _project_shared(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert self._shared is not None
        gate_up, down = self._shared.gate_up, self._shared.down
        projected = matmul(x, gate_up) if self._invariant else gate_up(x)
        inner = silu_and_mul(projected) if self._gate is None else weighed(projected, x, self._gate)
        if self._invariant:
            matmul(inner, down, out)
        else:
            down.into(inner, out)


def sizes_for(pairs: int, experts: int, eight: bool = False) -> Sizes:
    """For so many choices of one of so many experts. The best of those tried on an H200, 128 experts of
    2048 x 768. `eight`: both operands have 8 bits."""
    known, large = (SIZES_8, LARGE_8) if eight else (SIZES, LARGE)
    return next((sizes for most, sizes in known.items() if pairs <= most * experts), large)
