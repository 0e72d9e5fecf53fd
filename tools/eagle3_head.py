"""The head that `train_eagle3.py` trains: what it computes, and its checkpoint."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each step so far, [rows, heads, tokens, dim]."""


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.q_proj = nn.Linear(2 * hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, kept: Kept) -> torch.Tensor:
        """[rows, tokens, 2 * hidden] -> [rows, tokens, hidden]. `kept`: keys and values of the steps before,
        which this one's are added to. A token sees all before it of the first step, and of each later step
        its own, which stands for the token after the one of the step before."""
        rows, tokens = x.shape[:2]
        q = _rotated(self.q_proj(x).view(rows, tokens, self.heads, self.dim), rotation).transpose(1, 2)
        k = _rotated(self.k_proj(x).view(rows, tokens, self.kv_heads, self.dim), rotation).transpose(1, 2)
        v = self.v_proj(x).view(rows, tokens, self.kv_heads, self.dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        kept.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (first, values), *others = kept
        scores = q @ first.transpose(-1, -2)
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        own = [(q * keys).sum(-1, keepdim=True) for keys, _ in others]
        weights = (torch.cat([scores, *own], -1).float() / math.sqrt(self.dim)).softmax(-1).to(v.dtype)
        found = weights[..., :tokens] @ values
        for index, (_, value) in enumerate(others):
            found = found + weights[..., tokens + index, None] * value
        out: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return out


def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, heads, dim]; rotation: cosines and sines [2, tokens, 1, dim / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = rotation.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: dict[str, int], eps: float) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Norm(hidden, eps) for _ in range(3)
        )
        heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.self_attn = Attention(hidden, *heads, config["head_dim"])
        self.mlp = Mlp(hidden, config["intermediate_size"])

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        kept: Kept,
    ) -> torch.Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, rotation, kept)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Head(nn.Module):
    """Its parameters have the names of the format's tensors."""

    def __init__(
        self,
        hf: Any,
        embedding: torch.Tensor,
        inner: int,
        drafts: torch.Tensor,
        scale: torch.Tensor | None = None,
    ) -> None:
        """hf: the model's configuration; embedding: its own, [vocabulary, hidden], which is no part of the
        head; drafts: int64 [draft vocabulary], ids of the model's tokens in rising order; scale: the size of
        the states' values, [3 * hidden], which differs much between layers."""
        super().__init__()
        self.hf = hf
        self.config = {
            "hidden_size": hf.hidden_size,
            "intermediate_size": inner,
            "num_attention_heads": hf.num_attention_heads,
            "num_key_value_heads": hf.num_key_value_heads,
            "head_dim": hf.head_dim,
        }
        self.eps, self.theta = hf.rms_norm_eps, hf.rope_parameters["rope_theta"]
        self.fc = nn.Linear(3 * hf.hidden_size, hf.hidden_size, bias=False)
        self.midlayer = Layer(self.config, self.eps)
        self.norm = Norm(hf.hidden_size, self.eps)
        self.lm_head = nn.Linear(hf.hidden_size, len(drafts), bias=False)
        self.drafts, self.embedding, self.scale = drafts, embedding.detach(), scale
        self.to(embedding.device)
        with torch.no_grad():
            self.lm_head.weight.copy_(self.embedding[drafts])

    def forward(self, taps: torch.Tensor, ids: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """The model's states [rows, tokens, 3 * hidden], the tokens [rows, tokens] -> of each step the states
        [rows, tokens, hidden]: those of step s at t predict the token t + 2 + s, from the model's states up
        to t and the tokens up to t + 1 + s."""
        hidden, kept = self.fc(taps if self.scale is None else taps / self.scale), Kept()
        tokens, dim = ids.shape[1], self.config["head_dim"]
        frequencies = self.theta ** (-torch.arange(0, dim, 2, device=ids.device).float() / dim)
        for step in range(steps):
            at = torch.arange(step, step + tokens, device=ids.device).float()
            angles = torch.outer(at, frequencies)[:, None]
            following = functional.pad(ids[:, 1 + step :], (0, 1 + step))
            embedded = functional.embedding(following, self.embedding)
            hidden = self.midlayer(embedded, hidden, torch.stack((angles.cos(), angles.sin())), kept)
            yield hidden

    def save(self, out: pathlib.Path, tap: tuple[int, ...]) -> None:
        """In bfloat16, as two files. tap: before which of the model's layers it reads hidden states."""
        hf, count = self.hf, len(self.drafts)
        tensors = {name: value.detach() for name, value in self.named_parameters()}
        if self.scale is not None:
            tensors["fc.weight"] = tensors["fc.weight"] / self.scale
        tensors = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
        mapped = torch.zeros(hf.vocab_size, dtype=torch.bool)
        mapped[self.drafts.cpu()] = True
        tensors |= {"d2t": self.drafts.cpu() - torch.arange(count), "t2d": mapped}
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **self.config,
            "num_hidden_layers": 1,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": hf.max_position_embeddings,
            "vocab_size": hf.vocab_size,
            "draft_vocab_size": count,
            "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [at - 1 for at in tap]},
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        head = {"lm_head.weight": tensors.pop("lm_head.weight").cpu().contiguous()}
        save_file(head, out / "model-00002-of-00002.safetensors")
        save_file(
            {n: t.cpu().contiguous() for n, t in tensors.items()}, out / "model-00001-of-00002.safetensors"
        )
