"""Small random checkpoints of models that see, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VOCAB = 160
IMAGE_TOKEN = 150
PATCH, MERGE = 4, 2
SIZE = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 64}
"""Pixels of a resized image, at least and at most."""

_TEXT: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
_VISION: dict[str, object] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}
_EXPERTS: dict[str, object] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def save_qwen3_vl(path: Path, *, experts: bool = False, **text: object) -> torch.nn.Module:
    """-> transformers' model, in float32."""
    options: dict[str, object] = {
        "text_config": {**_TEXT, **(_EXPERTS if experts else {}), **text},
        "vision_config": _VISION,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": IMAGE_TOKEN + 1,
        "vision_start_token_id": IMAGE_TOKEN + 2,
        "vision_end_token_id": IMAGE_TOKEN + 3,
    }
    torch.manual_seed(1)
    if experts:
        model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**options)).eval()
    else:
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.lm_head.weight[IMAGE_TOKEN:] = 0  # transformers takes a sampled placeholder for one of an image
    model.save_pretrained(path)
    processor().save_pretrained(path)
    return model


def processor() -> Qwen2VLImageProcessorPil:
    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size=SIZE, image_mean=half, image_std=half
    )
