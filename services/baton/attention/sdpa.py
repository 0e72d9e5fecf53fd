"""Softmax attention over keys and values that lie together, with soft capping and sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.layers.attention import AttentionOptions


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    causal: bool = True,
) -> torch.Tensor:
    """q [rows, heads, queries, dim], k and v [rows, kv heads, keys, dim] -> q's shape. `causal`: where there
    is no mask, the last query sees all keys, the one before all but the last, and so on."""
    causal = causal and mask is None
    if options.softcap is None and options.sinks is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=options.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    rows, kv_heads, keys, dim = k.shape
    queries = q.shape[2]
    scale = dim**-0.5 if options.scale is None else options.scale
    grouped = q.reshape(rows, kv_heads, -1, dim)
    scores = (grouped @ k.transpose(2, 3)).float() * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.view(rows, kv_heads, -1, queries, keys)
    if causal:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(ones.triu(keys - queries + 1), -torch.inf)
    elif mask is not None:
        scores = scores + mask.unsqueeze(2) if mask.dim() == 4 else scores + mask
    if options.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = options.sinks.float().view(kv_heads, -1, 1, 1).expand(rows, -1, -1, -1, -1)
        # Rows of one token come with a KV head's query heads as its queries.
        sinks = sinks.reshape(rows, kv_heads, scores.shape[2], -1, 1).expand(*scores.shape[:4], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return (weights.view(rows, kv_heads, -1, keys).to(v.dtype) @ v).view(q.shape)
