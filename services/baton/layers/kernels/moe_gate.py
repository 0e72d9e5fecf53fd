"""Triton: the scores of a router whose weights are float32 while tokens have 16 bits, in one launch.

Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SPLITS = ((64, 8), (256, 4), (1024, 2))
"""Up to so many tokens, parts of the sums, so that enough programs run."""


@triton.jit(do_not_specialize=["rows"])
def _score(
    x,
    weight,
    out,
    rows,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    part: tl.constexpr = (K + SPLITS * BK - 1) // (SPLITS * BK) * BK
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    columns = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(split * part, split * part + part, BK):
        k = start + columns
        there = (k < K)[None, :]
        a = tl.load(x + m.to(tl.int64)[:, None] * K + k[None, :], mask=(m < rows)[:, None] & there, other=0.0)
        w = tl.load(weight + n[:, None] * K + k[None, :], mask=(n < EXPERTS)[:, None] & there, other=0.0)
        total = tl.dot(a.to(tl.float32), tl.trans(w), total, input_precision="tf32x3")
    at = (split * rows + m).to(tl.int64)[:, None] * EXPERTS + n[None, :]
    tl.store(out + at, total, mask=(m < rows)[:, None] & (n < EXPERTS)[None, :])


def score(x: torch.Tensor, weight: torch.Tensor, pdl: bool = True) -> torch.Tensor:
    """x [tokens, hidden] times weight float32 [experts, hidden], in parts to be added: float32
    [parts, tokens, experts]. `pdl`: starts while the kernel before ends, and waits for it."""
    tokens, hidden = x.shape
    experts = weight.shape[0]
    splits = next((parts for most, parts in _SPLITS if tokens <= most), 1)
    height, width = (16 if tokens <= 64 else 64), min(64, max(16, triton.next_power_of_2(experts)))
    out = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    _score[(triton.cdiv(tokens, height), triton.cdiv(experts, width), splits)](
        x,
        weight,
        out,
        tokens,
        K=hidden,
        EXPERTS=experts,
        BM=height,
        BN=width,
        BK=64,
        SPLITS=splits,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
