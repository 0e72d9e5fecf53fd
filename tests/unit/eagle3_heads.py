"""EAGLE-3 heads in plain torch: checkpoints of both formats, and what they compute."""

from __future__ import annotations

import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 128, 4, 2, 32, 192
"""Of heads; that of the models is the same."""
LAYERS = (1, 2, 3)
_SHAPES = {
    "self_attn.q_proj": (HEADS * DIM, 2 * HIDDEN),
    "self_attn.k_proj": (KV_HEADS * DIM, 2 * HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, 2 * HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def random_head(first: str, drafts: int, vocab: int, seed: int = 3, **sizes: int) -> dict[str, torch.Tensor]:
    """`first`: the name of its first layer; drafts: tokens that it can draft, every second one first."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    tensors = {f"{first}.{name}.weight": noise(*shape) for name, shape in _SHAPES.items()}
    for name in _NORMS:
        tensors[f"{first}.{name}.weight"] = 1 + noise(1, HIDDEN)[0]
    tensors["fc.weight"] = noise(HIDDEN, 3 * HIDDEN)
    tensors["norm.weight"] = 1 + noise(1, HIDDEN)[0]
    tensors["lm_head.weight"] = noise(drafts, HIDDEN)
    if drafts < vocab:
        targets = torch.arange(drafts) * (vocab // drafts)
        tensors["d2t"] = targets - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, targets, True)
    return tensors


def save_head(path, tensors, vocab, *, speculators=False, norm_before_residual=False, norm_before_fc=False):
    layers = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "vocab_size": vocab,
    }
    own = {"draft_vocab_size": len(tensors["lm_head.weight"]), "norm_before_residual": norm_before_residual}
    own["norm_before_fc"] = norm_before_fc
    if speculators:
        config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        config["model_type"] = "speculator_model"
        config |= {"transformer_layer_config": layers, "eagle_aux_hidden_state_layer_ids": LAYERS}
    else:
        behind = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS]}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layers, "eagle_config": behind}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, **own}))
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


class PlainHead:
    """A head of one layer, computed over a whole sequence."""

    def __init__(self, tensors, embedding, first, *, before_residual=False):
        self.tensors, self.embedding, self.first = tensors, embedding, first
        self.before_residual = before_residual

    def _norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], 1e-6)

    def enter(self, hidden):
        if "input_norm.weight" in self.tensors:
            hidden = self._norm(hidden, "input_norm")
        return hidden @ self.tensors["fc.weight"].T

    def forward(self, tokens, hidden):
        """[n], [n, hidden] -> [n, hidden]"""
        own = {name: self.tensors[f"{self.first}.{name}.weight"] for name in _SHAPES}
        embedded = F.embedding(tokens, self.tensors.get("embed_tokens.weight", self.embedding))
        normed = self._norm(hidden, f"{self.first}.hidden_norm")
        x = torch.cat((self._norm(embedded, f"{self.first}.input_layernorm"), normed), -1)
        q, k, v = (x @ own[f"self_attn.{name}_proj"].T for name in "qkv")
        count = len(tokens)
        q = self._rotated(q.view(count, HEADS, DIM))
        k = self._rotated(k.view(count, KV_HEADS, DIM)).repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.view(count, KV_HEADS, DIM).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        hidden_keys = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ own["self_attn.o_proj"].T
        out = (normed if self.before_residual else hidden) + attended
        normed = self._norm(out, f"{self.first}.post_attention_layernorm")
        inner = F.silu(normed @ own["mlp.gate_proj"].T) * (normed @ own["mlp.up_proj"].T)
        return out + inner @ own["mlp.down_proj"].T

    @staticmethod
    def _rotated(x):
        frequencies = 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)
        angles = torch.outer(torch.arange(len(x)).float(), frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def logits(self, hidden):
        """Of the drafts' vocabulary."""
        return self._norm(hidden, "norm") @ self.tensors["lm_head.weight"].T

    def chain(self, features, tokens, count):
        """The best tokens behind `tokens`, whose model has given `features` of all but the last."""
        hidden, following = self.enter(features), tokens[1:]
        found = []
        for _ in range(count):
            out = self.forward(torch.tensor(following), hidden)
            best = int(self.logits(out)[-1].argmax())
            if "d2t" in self.tensors:
                best += int(self.tensors["d2t"][best])
            found.append(best)
            hidden, following = torch.cat((hidden, out[-1:])), [*following, best]
        return found
