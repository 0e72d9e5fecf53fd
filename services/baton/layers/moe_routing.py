"""Which experts a token has, and how they are weighed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from baton.layers.parameters import Parameters
from baton.model_path import CheckpointError


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's scores choose its experts and weigh them.

    Softmax over all experts, the best ones, renormalized, is also softmax over the best logits (gpt-oss).
    """

    top_k: int
    """Experts of a token."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """The chosen scores are divided by their sum."""
    scale: float = 1.0
    """Factor of the experts' weights after they are chosen and normalized."""
    groups: int = 1
    """Experts are in groups of neighbours, of which a token uses `top_groups`."""
    top_groups: int = 1
    group_best: int = 1
    """A group counts as much as the sum of its best scores, so many of them: 1 in DeepSeek-V2, 2 in V3."""

    def choose(
        self, logits: torch.Tensor, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, experts] -> weights float32 and experts int64, [tokens, top_k] each. `correction` float32
        [experts] is added to the scores where experts are chosen, not where they are weighed."""
        logits = logits.float()
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        ranked = scores if correction is None else scores + correction
        if self.groups > 1:
            grouped = ranked.view(len(ranked), self.groups, -1)
            worth = grouped.topk(self.group_best, -1).values.sum(-1)
            used = torch.zeros_like(worth, dtype=torch.bool)
            used.scatter_(-1, worth.topk(self.top_groups, -1).indices, True)
            ranked = grouped.masked_fill(~used.unsqueeze(-1), -torch.inf).flatten(-2)
        experts = ranked.topk(self.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


class MoeGate:
    """Scores a token's experts by a linear layer and chooses among them."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        hidden: int,
        experts: int,
        routing: Routing,
        *,
        bias: bool = False,
        correction: bool = False,
        float32: bool = False,
    ) -> None:
        """`correction`: the checkpoint has `e_score_correction_bias`; `float32`: the layer is computed in
        float32. Raises CheckpointError if a token cannot have so many experts."""
        groups, top_groups = routing.groups, routing.top_groups
        if experts % groups or not (1 <= top_groups <= groups):
            raise CheckpointError(f"{experts} experts cannot be chosen in {top_groups} of {groups} groups")
        if not 1 <= routing.top_k <= experts // groups * top_groups:
            raise CheckpointError(f"a token cannot have {routing.top_k} of the {experts} experts")
        self.routing, self.experts = routing, experts
        self.dtype = torch.float32 if float32 else parameters.dtype
        self.linear = replace(parameters, dtype=self.dtype).linear(
            {name: experts}, hidden, bias, quantize=False
        )
        self.correction: torch.Tensor | None = None
        if correction:
            self.correction = parameters.empty(experts, dtype=torch.float32)
            parameters.add(f"{name}.e_score_correction_bias", self.correction, fill="zeros")

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, hidden] -> weights float32 and experts int64, [tokens, experts a token] each"""
        return self.routing.choose(self.linear(x.to(self.dtype)), self.correction)
