"""Small random checkpoints in Hugging Face layout, made by transformers, each with a tokenizer beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from transformers_architectures import ARCHITECTURES as OTHERS

ARCHITECTURES: dict[str, tuple[type, type, bool]] = {
    "deepseek": (DeepseekV3Config, DeepseekV3ForCausalLM, False),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, True),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM, True),
    "glm4-moe": (Glm4MoeConfig, Glm4MoeForCausalLM, False),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, False),
    "llama4": (Llama4TextConfig, Llama4ForCausalLM, False),
    "mixtral": (MixtralConfig, MixtralForCausalLM, False),
    "phi3": (Phi3Config, Phi3ForCausalLM, False),
    "gpt2": (GPT2Config, GPT2LMHeadModel, True),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, True),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, False),
    "llama": (LlamaConfig, LlamaForCausalLM, True),
    "mistral": (MistralConfig, MistralForCausalLM, False),
    "mistral-window": (MistralConfig, MistralForCausalLM, False),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, False),
}
"""Name -> configuration, model, whether output and input embeddings are one."""
MORE: dict[str, tuple[type, type, bool]] = {
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM, False),
    "deepseek-v3.2": (DeepseekV32Config, DeepseekV32ForCausalLM, False),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, False),
    "qwen3.5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, True),
}
"""Likewise; only in the whole matrix of test_exactness.py."""
BY_TRANSFORMERS = [f"transformers:{name}" for name in OTHERS]
"""Likewise, computed by transformers' code."""

VOCABULARY = 320
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    "a decode node fetches the pages of a prompt and streams the tokens",
    "the prefill node keeps the pages under a lease until they are here",
    "each step is a batch of rows; each row has a page table of its own",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    fast.chat_template = CHAT_TEMPLATE
    return fast


_DEEPSEEK: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": _DEEPSEEK,
    "deepseek-v2": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 20,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    },
    "deepseek-v3.2": {**_DEEPSEEK, "index_topk": 16, "index_n_heads": 16, "index_head_dim": 24},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4": {
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "final_logit_softcapping": 30.0,
    },
    "glm4-moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "use_qk_norm": True,
    },
    "gpt-oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4": {
        "attention_chunk_size": 40,
        "no_rope_layers": [1, 0, 1],
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "num_local_experts": 8,
        "floor_scale": 32,
    },
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3-moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen3.5": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
"""What an architecture needs besides what all have."""


def make_model(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Random weights, wide enough that rounding does not decide which logit is the largest."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    if name in BY_TRANSFORMERS:
        config_class, own = OTHERS[name.removeprefix("transformers:")]
        config = config_class(**{**options, "num_hidden_layers": 2, **own})
        model = AutoModelForCausalLM.from_config(config).float().eval()
    else:
        config_class, model_class, tied = {**ARCHITECTURES, **MORE}[name]
        own = {"head_dim": 16, "tie_word_embeddings": tied, **OPTIONS.get(name, {}), **overrides}
        model = model_class(config_class(**{**options, **own})).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            # As made they are all ones or zeros, which hides a norm or a bias that is left out.
            minus_one = name == "qwen3.5" and ".linear_attn." not in parameter_name
            mean = float("norm" in parameter_name and not minus_one)
            torch.nn.init.normal_(parameter, mean, 0.2)
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
