"""Checkpoints with a layer of multi-token prediction, in the published layouts, and what it computes by
transformers' own decoder layer."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from random_checkpoints import _LATENT, save_checkpoint
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Glm4MoeConfig, Qwen3_5TextConfig, Qwen3NextConfig

LAYERS = 2
_HYBRID = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention"],
}
VARIANTS = {
    "deepseek-v3": (
        DeepseekV3Config,
        {**_LATENT, "q_lora_rank": 24, "max_position_embeddings": 512},
    ),
    "glm4-moe": (
        Glm4MoeConfig,
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "max_position_embeddings": 512,
        },
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        {
            **_HYBRID,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3.5": (Qwen3_5TextConfig, {**_HYBRID, "tie_word_embeddings": True}),
}


@dataclass
class MtpReference:
    """The model by transformers, and its layer of multi-token prediction."""

    model: torch.nn.Module
    layer: torch.nn.Module
    tensors: dict[str, torch.Tensor]
    names: tuple[str, str, str, str]
    """Of the two norms, of the projection and of the last norm."""
    plus_one: bool

    def _norm(self, x, name):
        weight = self.tensors[f"{name}.weight"]
        eps = self.model.config.rms_norm_eps
        return F.rms_norm(x, x.shape[-1:], weight + 1 if self.plus_one else weight, eps)

    @torch.no_grad()
    def features(self, tokens):
        """The model's final normalized states, [tokens, hidden]."""
        return self.model.model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.no_grad()
    def forward(self, tokens, hidden):
        """[n], [n, hidden] -> [n, hidden]"""
        of_tokens, of_hidden, projection, last = self.names
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        both = torch.cat((self._norm(embedded, of_tokens), self._norm(hidden, of_hidden)), -1)
        x = (both @ self.tensors[f"{projection}.weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x, positions)
        found = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        found = found[0] if isinstance(found, tuple) else found
        return self._norm(found[0], last)

    @torch.no_grad()
    def logits(self, hidden):
        return self.model.lm_head(hidden)

    def chain(self, tokens, count):
        """The best tokens behind `tokens`, each by the layer's own states behind the first."""
        hidden, following, found = self.features(tokens)[:-1], list(tokens[1:]), []
        for _ in range(count):
            out = self.forward(following, hidden)
            found.append(int(self.logits(out[-1]).argmax()))
            hidden, following = torch.cat((hidden, out[-1:])), [*following, found[-1]]
        return found


def save_with_mtp(variant: str, path: Path) -> MtpReference:
    model = save_checkpoint(variant, path, variants=VARIANTS)
    config = model.config
    config._attn_implementation = "eager"
    deepseek = variant in ("deepseek-v3", "glm4-moe")
    layer = type(model.model.layers[-1])(config, LAYERS - 1).eval()
    start = f"model.layers.{LAYERS}." if deepseek else "mtp."
    inner = start if deepseek else "mtp.layers.0."
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    if not deepseek:
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    names = tuple(start + name for name in own)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1:
                value.copy_((1.0 if "norm" in name and deepseek else 0.0) + 0.3 * noise)
            else:
                value.copy_(noise * 1.5 / math.sqrt(value.shape[-1]))
    hidden = config.hidden_size
    tensors = {}
    for name in names:
        if name == names[2]:
            tensors[f"{name}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / 8
        else:
            noise = 0.3 * torch.randn(hidden, generator=generator)
            tensors[f"{name}.weight"] = noise + deepseek
    stored = dict(tensors)
    for name, value in layer.state_dict().items():
        stored |= {inner + own: part for own, part in _published(name, value)}
    if deepseek:  # as published: copies of what the model has
        stored[f"{start}embed_tokens.weight"] = model.model.embed_tokens.weight
        stored[f"{start}shared_head.head.weight"] = model.lm_head.weight
    file = path / "model.safetensors"
    whole = {**load_file(file), **stored}
    save_file({name: value.detach().clone().contiguous() for name, value in whole.items()}, file)
    written = json.loads((path / "config.json").read_text())
    written["num_nextn_predict_layers" if deepseek else "mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(written))
    return MtpReference(model, layer, tensors, names, not deepseek)


def _published(name, value):
    """Tensors of published checkpoints: a matrix each of every expert."""
    if name.endswith("experts.gate_up_proj"):
        base = name.removesuffix("gate_up_proj")
        for i, both in enumerate(value):
            for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                yield f"{base}{i}.{part}.weight", half
    elif name.endswith("experts.down_proj"):
        base = name.removesuffix("down_proj")
        yield from ((f"{base}{i}.down_proj.weight", each) for i, each in enumerate(value))
    else:
        yield name, value
