"""Models in GGUF files: their configuration, and their tensors under the names of Hugging Face checkpoints.

llama.cpp's `convert_hf_to_gguf.py` says what such a file holds. transformers' own GGUF reader is not used: it
ignores `rope.scaling.*`, `rope_freqs` and `attention.key_length`, and unpacks the whole file at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.checkpoint import CheckpointError
from baton.gguf_file import PIECE, GgufFile

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""general.architecture: model type and class in transformers. Mistral's models are "llama" too."""

_NOT_SUPPORTED = (
    *("attention.scale", "attention.sliding_window", "expert_count"),
    *("embedding_scale", "logit_scale", "residual_scale"),
)
"""Metadata that would change what these architectures compute."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IGNORED = frozenset({"rope_freqs.weight"})
"""Read as part of the configuration."""


def read_hf_config(file: GgufFile) -> Any:
    """The transformers configuration of the model in a file. Raises CheckpointError."""
    from transformers import AutoConfig

    architecture = file.value("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    for key in _NOT_SUPPORTED:
        if file.metadata.get(f"{architecture}.{key}"):
            raise CheckpointError(f"{file.path}: {architecture}.{key} is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks tensor token_embd.weight")
    heads = file.value("*.attention.head_count", int)
    hidden = file.value("*.embedding_length", int)
    head_dim = file.value("*.attention.key_length", int, hidden // max(1, heads))
    if file.value("*.attention.value_length", int, head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: values of another size than keys are not supported")
    model_type, name = ARCHITECTURES[architecture]
    embedding = file.tensors["token_embd.weight"].tensor_type.name
    rotated = file.value("*.rope.dimension_count", int, head_dim)
    return AutoConfig.for_model(
        model_type,
        architectures=[name],
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden,
        intermediate_size=file.value("*.feed_forward_length", int),
        num_hidden_layers=file.value("*.block_count", int),
        num_attention_heads=heads,
        num_key_value_heads=file.value("*.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_position_embeddings=file.value("*.context_length", int),
        rms_norm_eps=file.value("*.attention.layer_norm_rms_epsilon", float),
        rope_parameters={
            "rope_theta": float(file.value("*.rope.freq_base", float, 10000.0)),
            **({} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}),
            **_rope_scaling(file, head_dim),
        },
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        dtype={"F32": "float32", "F16": "float16"}.get(embedding, "bfloat16"),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """transformers' rope parameters, theta excepted."""
    if "rope_freqs.weight" in file.tensors:
        # Files of Llama 3.1 and later hold what each frequency is divided by, and not the parameters that
        # these divisors come from. "longrope" takes divisors.
        divisors = file.unpack("rope_freqs.weight", slice(None)).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": file.value("*.context_length", int),
        }
    kind = file.value("*.rope.scaling.type", str, "linear")
    factor = file.value("*.rope.scaling.factor", float, file.value("*.rope.scale_linear", float, 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{file.path}: rope scaling {kind!r} is not supported; supported are linear, yarn"
        )
    parameters: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = file.value("*.rope.scaling.original_context_length", int)
        parameters["original_max_position_embeddings"] = original
    return parameters


def hf_name(name: str) -> str:
    """What a tensor is called in a Hugging Face checkpoint; an unknown one keeps its name."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = found.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_OTHERS[part]}.{kind}" if part in _OTHERS else name


class GgufTensors:
    """A file's tensors for the loader (`TensorFile`), unpacked in pieces when they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._names = {hf_name(name): name for name in self._file.tensors if name not in _IGNORED}

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(self._file.shape(own)) for name, own in self._names.items()}

    def read(self, names: Collection[str], whole: Collection[str]) -> Iterator[tuple[str, int, torch.Tensor]]:
        for name in names:
            own = self._names[name]
            count, *inner = self._file.shape(own)
            order = self._row_order(own, count)
            step = count if name in whole else max(1, PIECE // math.prod(inner))
            for start in range(0, count, step):
                rows = slice(start, start + step)
                piece = self._file.unpack(own, rows if order is None else order[rows])
                yield name, start, torch.from_numpy(np.require(piece, requirements="W"))

    def _row_order(self, name: str, count: int) -> Any:
        """Where the rows of a Hugging Face checkpoint's tensor are, or None: in their own order.

        Rotation pairs each dimension with the one half a head away in Hugging Face checkpoints, and with the
        next one in "llama" files: convert_hf_to_gguf.py interleaves the two halves of each head's rows.
        """
        kind = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
        if kind is None or self._file.value("general.architecture", str) != "llama":
            return None
        heads = self._file.value(f"*.attention.{kind}", int, self._file.value("*.attention.head_count", int))
        return np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def sample(self, update: Callable[[bytes], None]) -> None:
        for name in sorted(self._file.tensors):
            data = self._file.tensors[name].data.reshape(-1).view(np.uint8)
            for offset in (0, data.size // 2, max(0, data.size - 64)):
                update(data[offset : offset + 64].tobytes())
