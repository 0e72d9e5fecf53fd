"""Writes models of transformers as GGUF files, as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel, PreTrainedTokenizerFast

NAMES = [
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk.\1.attn_norm"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm", r"blk.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm", r"blk.\1.attn_\2_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"blk.\1.attn_\2"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head: of the first half and of the second in turn."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def rounded(model: PreTrainedModel, kind: str) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Packed matrices of a model by their GGUF names. The model keeps what they unpack to."""
    config = model.config
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, suffix = name.rpartition(".")
            own = next(re.sub(pattern, to, module) for pattern, to in NAMES if re.fullmatch(pattern, module))
            weight = parameter.numpy()
            type = GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
            parameter.copy_(torch.from_numpy(dequantize(quantize(weight, type), type)))
            found = re.search(r"\.attn_([qk])$", own)
            if found and config.model_type in ("llama", "mistral"):
                weight = interleaved(weight, heads[found[1]])
            tensors[f"{own}.{suffix}"] = quantize(weight, type), type
    return tensors


def add_rope(writer: GGUFWriter, model: PreTrainedModel) -> None:
    parameters = dict(model.config.rope_parameters)
    writer.add_rope_freq_base(parameters["rope_theta"])
    match parameters["rope_type"]:
        case "linear" | "yarn" as kind:
            writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
            writer.add_rope_scaling_factor(parameters["factor"])
            if kind == "yarn":
                writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
        case "llama3":
            plain = parameters["rope_theta"] ** -(
                np.arange(0, model.config.head_dim, 2) / model.config.head_dim
            )
            factors = plain / model.model.rotary_emb.inv_freq.numpy()
            writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        case kind:
            assert kind == "default", kind


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str) -> None:
    """A byte-level BPE."""
    import json

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in spec["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if id in special else 1 for id in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "Q8_0",
    tokenizer: PreTrainedTokenizerFast | None = None,
    pre: str = "gpt-2",
    **metadata: Any,
) -> Path:
    """Writes the model with its matrices of type `kind`, and rounds the model's own weights to what the file
    holds. metadata: strings and integers; dots in keys as "__"."""
    config = model.config
    writer = GGUFWriter(path, {"mistral": "llama"}.get(config.model_type, config.model_type))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    add_rope(writer, model)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, pre)
    else:
        writer.add_token_list([str(id) for id in range(config.vocab_size)])
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    for name, (data, type) in rounded(model, kind).items():
        writer.add_tensor(name, data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
