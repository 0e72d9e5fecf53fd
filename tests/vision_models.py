"""Small random checkpoints of models that see, made and saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
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
_RECURRENT: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 24,
}
"""Of Qwen3.5."""


def save_qwen3_vl(path: Path, *, experts: bool = False, **text: object) -> torch.nn.Module:
    """-> transformers' model, in float32."""
    config = (Qwen3VLMoeConfig if experts else Qwen3VLConfig)(**_options(experts, _VISION, text))
    make = Qwen3VLMoeForConditionalGeneration if experts else Qwen3VLForConditionalGeneration
    return _save(path, make, config)


def save_qwen3_5(path: Path, *, experts: bool = False, **text: object) -> torch.nn.Module:
    """-> transformers' model, in float32."""
    vision = {name: value for name, value in _VISION.items() if name != "deepstack_visual_indexes"}
    options = _options(experts, vision, {**_RECURRENT, **text})
    config = (Qwen3_5MoeConfig if experts else Qwen3_5Config)(**options)
    make = Qwen3_5MoeForConditionalGeneration if experts else Qwen3_5ForConditionalGeneration
    return _save(path, make, config, 0.1)  # larger weights magnify how both sides round


def _options(experts: bool, vision: dict[str, object], text: dict[str, object]) -> dict[str, object]:
    return {
        "text_config": {**_TEXT, **(_EXPERTS if experts else {}), **text},
        "vision_config": vision,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": IMAGE_TOKEN + 1,
        "vision_start_token_id": IMAGE_TOKEN + 2,
        "vision_end_token_id": IMAGE_TOKEN + 3,
    }


def _save(path: Path, make: Any, config: object, deviation: float = 0.2) -> torch.nn.Module:
    torch.manual_seed(1)
    model: torch.nn.Module = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, deviation)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.lm_head.weight[IMAGE_TOKEN:] = 0  # transformers takes a sampled placeholder for one of an image
    model.save_pretrained(path)
    processor().save_pretrained(path)
    return model


def seeing_table(text: dict[str, Any], ids: list[int]) -> torch.nn.Module:
    """A model with heads of 16 that sees. ids: of the tokens that begin an image, stand for its parts, end
    it, and stand for a video's."""
    begin, image, end, video = ids
    config = Qwen3VLConfig(
        text_config={**text, "rope_parameters": _TEXT["rope_parameters"]},
        vision_config={**_VISION, "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    return Qwen3VLForConditionalGeneration(config)


SPECIAL = {
    0: "<|im_end|>",
    1: "<|im_start|>",
    IMAGE_TOKEN: "<|image_pad|>",
    IMAGE_TOKEN + 1: "<|video_pad|>",
    IMAGE_TOKEN + 2: "<|vision_start|>",
    IMAGE_TOKEN + 3: "<|vision_end|>",
}
TOKENIZER_VOCAB = 264
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system{{ '\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>{{ '\\n' }}"
    "{%- endif %}{%- for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{%- elif 'text' in part %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor %}"
    "<|im_end|>{{ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{%- endif %}"
)
"""As Qwen3-VL's, shortened."""


def save_tokenizer(path: Path) -> None:
    """A tokenizer of single bytes, whose image token is that of `save_qwen3_vl`; a model beside it needs
    vocab_size=TOKENIZER_VOCAB."""
    ids = iter(sorted(set(range(TOKENIZER_VOCAB)) - SPECIAL.keys()))
    alphabet = {letter: next(ids) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(alphabet | {name: id for id, name in SPECIAL.items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIAL[0], additional_special_tokens=list(SPECIAL.values())
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def save_vision_config(path: Path) -> None:
    """What a tokenizer process reads of a model, without the model."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "vocab_size": TOKENIZER_VOCAB,
        "vision_config": _VISION,
        "image_token_id": IMAGE_TOKEN,
        "max_position_embeddings": 4096,
        "model_type": "qwen3_vl",
        "eos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_tokenizer(path)
    processor().save_pretrained(path)


def processor() -> Qwen2VLImageProcessorPil:
    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size=SIZE, image_mean=half, image_std=half
    )
