"""The architectures that are served, and what a dense decoder is made of, read from a config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baton.layers.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties implied by the class name and not stated in config.json."""

    name: str
    qk_norm: bool = False
    """Queries and keys of each head pass an RMS norm before the rotation."""
    qkv_bias: bool = False
    """The query, key and value projections always have a bias, the output projection never."""


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("LlamaForCausalLM"),
        Architecture("MistralForCausalLM"),
        Architecture("Qwen2ForCausalLM", qkv_bias=True),
        Architecture("Qwen3ForCausalLM", qk_norm=True),
    )
}


class ModelError(Exception):
    """The model cannot be served; the message is one readable line."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    """Positions that the checkpoint was made for."""
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    rope: RopeConfig
    dtype: torch.dtype
    """Of the checkpoint's weights."""
    eos_token_ids: tuple[int, ...]


def read_config(path: Path, context_length: int | None = None) -> ModelConfig:
    """Reads config.json in `path`. `context_length` is how far the model will be used, if less than it can.

    Raises ModelError for what is not supported, rather than computing something else.
    """
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: not a model in Hugging Face layout")
    try:
        hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return replace(_convert(hf, context_length), eos_token_ids=_eos_token_ids(path, hf))
    except ModelError:
        raise
    except (
        Exception
    ) as error:  # anything that transformers and its validators may raise for an arbitrary file
        raise ModelError(f"{path / 'config.json'} cannot be used: {_first_line(error)}") from error


def _eos_token_ids(path: Path, hf: Any) -> tuple[int, ...]:
    """Of config.json and generation_config.json together: chat models often name their end of turn in the
    latter only."""
    found: list[int] = []
    generation = path / "generation_config.json"
    try:
        extra = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    except ValueError as error:
        raise ModelError(f"{generation} is damaged: {error}") from error
    for value in (hf.eos_token_id, extra):
        found.extend(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(set(found)))


def _convert(hf: Any, context_length: int | None) -> ModelConfig:
    names = list(getattr(hf, "architectures", None) or [])
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ModelError(
            f"architecture {', '.join(names) or '(none named)'} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    architecture = ARCHITECTURES[names[0]]
    if getattr(hf, "quantization_config", None) is not None:
        raise ModelError("quantized checkpoints are not supported: config.json has quantization_config")
    if hf.hidden_act != "silu":
        raise ModelError(f"hidden_act {hf.hidden_act!r} is not supported, only 'silu'")
    for name in ("num_experts", "num_local_experts"):
        if getattr(hf, name, None):
            raise ModelError(f"mixtures of experts are not supported: config.json has {name}")
    if getattr(hf, "pretraining_tp", 1) not in (1, None):
        raise ModelError("pretraining_tp other than 1 is not supported")
    context = min(context_length or hf.max_position_embeddings, hf.max_position_embeddings)
    window = sliding_window(hf)
    if window is not None and window < context:
        raise ModelError(
            f"sliding window attention is not supported: the window of {window} tokens is shorter than the "
            f"context of {context}; --context-length {window} serves the model without it"
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ModelError("num_attention_heads is not a multiple of num_key_value_heads")
    bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        context_length=hf.max_position_embeddings,
        tied=bool(hf.tie_word_embeddings),
        qkv_bias=architecture.qkv_bias or bias,
        output_bias=bias and not architecture.qkv_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        rope=_rope(hf, head_dim),
        dtype=_dtype(hf),
        eos_token_ids=(),
    )


def sliding_window(hf: Any) -> int | None:
    """The shortest attention window of any layer; None: every layer attends to all positions."""
    types = getattr(hf, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        return None
    if getattr(hf, "use_sliding_window", True) is False:
        return None
    window = getattr(hf, "sliding_window", None)
    return None if window is None else int(window)


def _rope(hf: Any, head_dim: int) -> RopeConfig:
    parameters = dict(getattr(hf, "rope_parameters", None) or {})
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    theta = float(parameters.pop("rope_theta", None) or getattr(hf, "rope_theta", None) or 10000.0)
    if float(parameters.pop("partial_rotary_factor", 1.0) or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    try:
        return RopeConfig.make(kind, head_dim, theta, hf.max_position_embeddings, parameters)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _dtype(hf: Any) -> torch.dtype:
    dtype = getattr(hf, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
