"""What an entry of `gguf_families` says of an architecture's files, and what all of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.gguf_file import GgufFile
from baton.model_path import CheckpointError
from baton.models.gguf_rope import rope_parameters

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]

SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor of a layer, or a part of it, becomes one of a Hugging Face checkpoint."""

    name: str
    """There, below the layer, with its ending."""
    rows: IntArray | None = None
    """Which rows of the file it has, in its order; None: all in theirs."""
    columns: IntArray | None = None
    """Which columns of the file it has, in its order; None: all in theirs."""
    shape: tuple[int, ...] | None = None
    """There, where that is not the file's."""
    value: Callable[[FloatArray], FloatArray] | None = None
    """What each number in the file becomes."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    model_type: str
    """In transformers."""
    options: Callable[[GgufFile], dict[str, Any]]
    """What the configuration has beyond `common`, or has otherwise."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer beyond those of LAYER: name -> name in Hugging Face checkpoints."""
    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    """Where experts are in Hugging Face checkpoints, and what their projections are called."""
    interleaved: bool = False
    """Rotation pairs neighbours in the file, and values half a head apart in Hugging Face checkpoints."""
    norms_plus_one: bool = False
    """Norms are written as the model multiplies by them, and Hugging Face checkpoints have one less."""
    changes: Callable[[GgufFile], Mapping[str, Sequence[Change]]] = lambda file: {}
    """Changes of a layer's tensors that are not merely called otherwise, by their names below the layer."""
    merged: Sequence[tuple[str, str, str]] = ()
    """Pairs of tensors of a layer whose rows are below each other in one of a Hugging Face checkpoint."""
    prefix: str = "model.layers"
    """How names of layers begin in Hugging Face checkpoints."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Tensors of no layer that are called otherwise than in OTHERS."""
    known: frozenset[str] = frozenset()
    """Keys of _REFUSED that this family reads."""


LAYER = {
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
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def layers(file: GgufFile) -> int:
    """Without those at the end that predict further tokens, for speculation."""
    return int(file.value("*.block_count", int) - file.value("*.nextn_predict_layers", int, 0))


def largest(file: GgufFile, key: str, default: int | None = None) -> int:
    """A number, or the largest of those of the layers. Raises CheckpointError if it is neither."""
    each = file.metadata.get(f"{file.value('general.architecture', str)}.{key}")
    if isinstance(each, list) and each and all(isinstance(one, int) for one in each):
        return int(max(each))
    return int(file.value(f"*.{key}", int, default))


def common(file: GgufFile) -> dict[str, Any]:
    """What the configurations of all architectures have."""
    embedding = file.tensors["token_embd.weight"].tensor_type.name
    heads = largest(file, "attention.head_count")
    return {
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": file.value("*.embedding_length", int),
        "num_hidden_layers": layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": largest(file, "attention.head_count_kv", heads),
        "max_position_embeddings": file.value("*.context_length", int),
        "rms_norm_eps": file.value("*.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": {"F32": "float32", "F16": "float16"}.get(embedding, "bfloat16"),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def plain(file: GgufFile, **rope: Any) -> dict[str, Any]:
    """Attention with keys and values, and a feed-forward layer without experts."""
    heads, hidden = largest(file, "attention.head_count"), file.value("*.embedding_length", int)
    head_dim = file.value("*.attention.key_length", int, hidden // max(1, heads))
    if file.value("*.attention.value_length", int, head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: values of another size than keys are not supported")
    return {
        "head_dim": head_dim,
        "intermediate_size": largest(file, "feed_forward_length", 0),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_parameters": rope_parameters(file, head_dim, **rope),
    }


def gating(file: GgufFile, *allowed: int) -> int:
    """How scores of experts are made; the first one if the file does not say it."""
    found = int(file.value("*.expert_gating_func", int, 0) or allowed[0])
    if found not in allowed:
        raise CheckpointError(f"{file.path}: expert_gating_func {found} is not supported")
    return found


def shared_experts(file: GgufFile) -> dict[str, Any]:
    """Experts beside a shared one, in groups: GLM-4.5 and DeepSeek."""
    count = file.value("*.expert_count", int)
    groups, used = _GROUPS.get(count, (1, 1))
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": file.value("*.expert_used_count", int),
        "n_shared_experts": file.value("*.expert_shared_count", int),
        "moe_intermediate_size": file.value("*.expert_feed_forward_length", int),
        "first_k_dense_replace": file.value("*.leading_dense_block_count", int, 0),
        "routed_scaling_factor": file.value("*.expert_weights_scale", float, 1.0) or 1.0,
        "norm_topk_prob": file.value("*.expert_weights_norm", bool, False),
        "n_group": file.value("*.expert_group_count", int, groups) or 1,
        "topk_group": file.value("*.expert_group_used_count", int, used) or 1,
    }


_GROUPS = {256: (8, 4), 160: (8, 3)}
"""By the number of experts, of DeepSeek-V3 and V2: groups, and how many of them a token uses. Older files do
not have them."""
