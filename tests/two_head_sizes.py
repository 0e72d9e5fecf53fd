"""A model that tests alone have: heads of two sizes, as in Gemma 4, with windows and without.

`register` makes it known to a process, which then serves what `save` has written with random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, LlamaConfig

from baton.layers.attention import Attention, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.llama import feed_forward, llama_like
from baton.models.loader import load_model
from baton.models.registry import FAMILIES

WINDOW = 24
NARROW, WIDE = (2, 16), (1, 64)
"""KV heads, and values of a head."""
LAYERS: tuple[tuple[tuple[int, int], int | None], ...] = (
    (NARROW, WINDOW),
    (NARROW, None),
    (WIDE, None),
    (NARROW, WINDOW),
    (WIDE, None),
)
"""Heads and window of each layer."""


class TwoHeadSizesConfig(LlamaConfig):
    model_type = "two_head_sizes"


def register() -> None:
    AutoConfig.register("two_head_sizes", TwoHeadSizesConfig, exist_ok=True)
    FAMILIES["TwoHeadSizesForCausalLM"] = "two_head_sizes"
    sys.modules["baton.models.two_head_sizes"] = sys.modules[__name__]


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    return llama_like(config, parameters, feed_forward, attention)


def attention(config: ModelConfig, parameters: Parameters, index: int, rope: Rope) -> Attention:
    """Of a wide head the first values alone are rotated."""
    (kv_heads, head_dim), window = LAYERS[index]
    options = AttentionOptions(window=window)
    size = config.hidden_size, config.num_heads, kv_heads, head_dim
    return Attention(parameters, index, *size, rope, options=options)


def save(path: Path) -> Path:
    """config.json alone: to be loaded as "dummy"."""
    TwoHeadSizesConfig(
        architectures=["TwoHeadSizesForCausalLM"],
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=NARROW[0],
        head_dim=NARROW[1],
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(path)
    return path


class DenseReference:
    """The model without pages: every token attends to all of its sequence at once."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(path, torch.float32, load_format="dummy")

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """-> float32 [tokens, vocab]"""
        positions = torch.arange(len(tokens))
        batch = Batch(torch.tensor(tokens), positions, _Dense())
        return self._model.logits(self._model.forward(batch))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class _Dense:
    """A `layers.batch.StepAttention`."""

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError

    def write_and_attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        window = LAYERS[layer][1] or len(q)
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        seen = (back >= 0) & (back < window)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(0, 1).flatten(1)
