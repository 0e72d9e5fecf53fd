"""Which module makes the models of an architecture."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.layers.parameters import Parameters
    from baton.models.config import ModelConfig
    from baton.models.decoder import Decoder

FAMILIES: dict[str, str] = {
    "BambaForCausalLM": "bamba",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "FalconH1ForCausalLM": "falcon_h1",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteMoeHybridForCausalLM": "granite_moe_hybrid",
    "KimiLinearForCausalLM": "kimi_linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Llama4ForCausalLM": "llama4",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
}
"""Name in config.json -> module of this package with a function `build`."""


OTHER_PARTS = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in (
        "vision_tower.",
        "vision_embedder.",
        "embed_vision.",
        "audio_tower.",
        "embed_audio.",
        "vision_model.",
        "vision_encoder.",
        "vision_projection.",
        "high_res_vision_",
        "image_tower.",
        "video_tower.",
        "aligner.",
        "projector.",
        "visual_embeddings_table.",
        "vqmodel.",
        "generation_",
        "multi_modal_projector.",
        "visual.",
        "connector.",
        "image_newline",
    )
)
"""How names start of tensors of what a wrapper has beside its language model."""


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    """The model, its parameters declared and not yet filled. Raises ModelError for what is not supported."""
    if config.wrapper:
        for part in OTHER_PARTS:
            parameters.ignore(part)
    decoder: Decoder = family(config.architecture).build(config, parameters)
    return decoder


def family(architecture: str) -> ModuleType:
    return import_module(f"baton.models.{FAMILIES[architecture]}")
