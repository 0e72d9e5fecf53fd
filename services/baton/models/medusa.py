"""Medusa heads: Cai et al., arXiv:2401.10774. Each guesses one of the tokens that follow, from a model's
final hidden states: residual layers, then a head of its own.

Checkpoints are those of vLLM (blocks, lm_heads), or of FasterDecoding in safetensors (each head a list of
layers).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from baton.checkpoint_limits import read_json
from baton.layers.linear import Linear
from baton.layers.parameters import Parameters
from baton.models.config import ModelError
from baton.models.decoder import Decoder, prepare_linears
from baton.models.loader import read_weights
from baton.models.tensor_files import tensor_files


def is_medusa(raw: dict[str, Any]) -> bool:
    """Whether this config.json is that of such heads."""
    return raw.get("model_type") == "medusa" or "medusa_num_heads" in raw


class MedusaHeads:
    def __init__(self, raw: dict[str, Any], names: set[str], target: Decoder) -> None:
        """`raw`: their config.json; `names`: of their tensors. Raises ModelError for what is not
        supported."""
        size, vocab = target.config.hidden_size, target.config.vocab_size
        if raw.get("truncated_vocab_size", vocab) != vocab:
            raise ModelError("Medusa heads of a part of the vocabulary (truncated_vocab_size): not supported")
        heads = raw.get("medusa_num_heads") or raw.get("num_heads") or 0
        depth = raw.get("medusa_num_layers") or raw.get("num_hidden_layers") or 1
        starts = ("medusa_heads.", "medusa_head.")
        start = next((s for s in starts if any(name.startswith(s) for name in names)), "")
        listed = f"{start}0.{depth}.weight" in names
        self.parameters = parameters = Parameters(target.dtype, target.device)
        self.heads: list[tuple[list[Linear], Linear]] = []
        """Residual layers of each head, and what makes logits."""
        for index in range(heads):
            layers = []
            for layer in range(depth):
                name = f"{start}{index}.{layer}.linear" if listed else f"{start}blocks.{index}.layers.{layer}"
                layers.append(parameters.linear({name: size}, size, f"{name}.bias" in names))
            name = f"{start}{index}.{depth}" if listed else f"{start}lm_heads.{index}"
            self.heads.append((layers, parameters.linear({name: vocab}, size)))

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [rows, hidden] at positions p -> float32 [rows, vocab] for positions
        p + 2 + head."""
        layers, output = self.heads[head]
        for layer in layers:
            hidden = hidden + F.silu(layer(hidden))
        return output(hidden).float()


def load_medusa(path: Path, target: Decoder) -> MedusaHeads:
    """Raises CheckpointError."""
    names = {name for file in tensor_files(path) for name in file.shapes()}
    heads = MedusaHeads(read_json(path / "config.json"), names, target)
    if not heads.heads:
        raise ModelError(f"{path}: config.json does not say how many Medusa heads there are (num_heads)")
    read_weights(path, heads.parameters, lambda done, total: None)
    prepare_linears(heads.parameters)
    return heads
