"""Architectures that transformers' code computes: small configurations."""

from __future__ import annotations

from typing import Any

import transformers

WINDOW = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}


def with_images(**options: Any) -> transformers.PretrainedConfig:
    """Gemma 3 that takes images, too; the options are those of its language model."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(text_config=options, vision_config=vision, mm_tokens_per_image=4)


ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (transformers.GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "gpt-neox": (transformers.GPTNeoXConfig, {"rotary_pct": 0.25}),
    "phi": (transformers.PhiConfig, {"partial_rotary_factor": 0.5}),
    "arcee": (transformers.ArceeConfig, {"head_dim": 16}),
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": 24}),
    "cohere": (transformers.CohereConfig, {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": (transformers.Cohere2Config, WINDOW),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 32, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, **WINDOW},
    ),
    "gemma3-images": (with_images, {"head_dim": 32, "query_pre_attn_scalar": 20, **WINDOW}),
    "gpt-oss": (
        transformers.GptOssConfig,
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "granite": (
        transformers.GraniteConfig,
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    ),
    "glm4": (transformers.Glm4Config, {"pad_token_id": None, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "nemotron": (transformers.NemotronConfig, {}),
    "exaone4": (transformers.Exaone4Config, WINDOW),
    "smollm3": (transformers.SmolLM3Config, {"pad_token_id": None, "no_rope_layers": [1, 0]}),
    "deepseek-v3": (
        transformers.DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "seed-oss": (transformers.SeedOssConfig, {"head_dim": 16}),
}
"""With windows, softcaps, sinks, partial rotation, parallel blocks and layers without rotation among them."""
