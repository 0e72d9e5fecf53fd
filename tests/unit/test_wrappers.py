"""Models that take more than text: their language models, by Baton's own code where a family has it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from random_checkpoints import Driver, save_checkpoint
from transformers import AutoModelForImageTextToText

from baton.checkpoint_config import end_token_ids
from baton.models.config import ModelError, read_config
from baton.models.loader import check_tensors

IMAGE = 299
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def axes(**more):
    """Rotation by three axes of positions."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], **more}
    return {**TEXT, "rope_parameters": rope}


def wrapper(config, **options):
    return lambda: getattr(transformers, config)(**{"image_token_id": IMAGE, **options})


def text(config, **more):
    return getattr(transformers, config)(**TEXT, **more)


WRAPPERS = {
    "llava": (
        wrapper(
            "LlavaConfig",
            vision_config=transformers.CLIPVisionConfig(**VISION),
            text_config=text("LlamaConfig"),
        ),
        "LlamaForCausalLM",
    ),
    "llava-onevision": (
        wrapper(
            "LlavaOnevisionConfig",
            vision_config=transformers.SiglipVisionConfig(**VISION),
            text_config=text("Qwen2Config"),
        ),
        "Qwen2ForCausalLM",
    ),
    "mistral3": (
        wrapper(
            "Mistral3Config",
            vision_config=transformers.PixtralVisionConfig(**VISION),
            text_config=text("MistralConfig", head_dim=16),
        ),
        "MistralForCausalLM",
    ),
    "internvl": (
        wrapper(
            "InternVLConfig",
            vision_config={**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
            text_config=text("Qwen3Config", head_dim=16),
        ),
        "Qwen3ForCausalLM",
    ),
    "smolvlm": (
        wrapper("SmolVLMConfig", vision_config=VISION, text_config=text("LlamaConfig"), scale_factor=1),
        "LlamaForCausalLM",
    ),
    "gemma3": (
        wrapper(
            "Gemma3Config",
            vision_config=VISION,
            text_config={**TEXT, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 24},
            mm_tokens_per_image=4,
        ),
        "Gemma3ForCausalLM",
    ),
    "cohere2-vision": (
        wrapper(
            "Cohere2VisionConfig",
            vision_config=transformers.SiglipVisionConfig(**VISION),
            text_config=text("Cohere2Config"),
            downsample_factor=1,
        ),
        None,
    ),
    "qwen2.5-vl": (wrapper("Qwen2_5_VLConfig", vision_config=BLOCKS, text_config=axes()), None),
    "qwen3-vl": (
        wrapper(
            "Qwen3VLConfig",
            vision_config={**BLOCKS, "deepstack_visual_indexes": [0]},
            text_config={**axes(mrope_interleaved=True), "head_dim": 16},
        ),
        "Qwen3VLForConditionalGeneration",
    ),
    "glm4v": (
        wrapper(
            "Glm4vConfig",
            vision_config=BLOCKS,
            text_config=axes(partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
        ),
        None,
    ),
}
"""Name -> (makes the configuration, the family whose code computes its text; None: transformers' code)"""


def save(name, path):
    torch.manual_seed(len(name))
    model = AutoModelForImageTextToText.from_config(WRAPPERS[name][0]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("name", WRAPPERS)
def test_logits_of_text_equal_those_of_transformers(tmp_path, name):
    model, family = save(name, tmp_path), WRAPPERS[name][1]
    check_tensors(tmp_path)
    config = read_config(tmp_path)
    assert config.architecture == (family or type(model).__name__)
    assert config.implementation == ("baton" if family else "transformers")
    driver = Driver(tmp_path)
    prompt = torch.randint(0, IMAGE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    track = driver.add(0, prompt, 8)
    driver.step([driver.chunk(track, 10)], [driver.init(track)])
    driver.step([driver.chunk(track, 30, sample=True)])
    for _ in range(7):
        driver.step([driver.decode(track)])
    driver.finish()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([track.tokens]), use_cache=False).logits[0]
    assert len(track.logits) == 8
    for at, found in track.logits.items():
        assert (found - logits[at - 1]).abs().max().item() < 1e-4


def test_parts_beside_the_language_model_are_left_out(tmp_path):
    """Of DeepSeek-VL, Janus, LightOnOCR, Ovis 2, VideoLLaMA 3 and Video-LLaVA, as transformers saves them."""
    from safetensors.torch import load_file, save_file

    save("llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [
        *("model.aligner.linear1.bias", "model.high_res_vision_proj.bias", "model.vqmodel.encoder.conv.bias"),
        *("model.generation_head.bias", "model.vision_encoder.ln_pre.weight", "model.projector.readout.bias"),
        *("model.visual_embeddings_table.weight", "image_tower.embeddings.bias", "video_tower.bias"),
        "model.vision_projection.norm.weight",
    ]
    others = {name: torch.zeros(2) for name in names}
    save_file(tensors | others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    parts = {name.partition(".linear1")[0] for name in check_tensors(tmp_path)}
    assert {"model.aligner", "model.vqmodel", "image_tower"} < parts


def test_a_wrapper_with_a_tensor_of_its_own_in_the_language_model_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save("llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cross_attention.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected tensor cross_attention\.weight"):
        check_tensors(tmp_path)


def test_ends_of_all_files_are_one_union_for_both_sides(tmp_path):
    save_checkpoint("llama3", tmp_path)

    def write(name, **fields):
        file = tmp_path / name
        old = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**old, **fields}))

    assert end_token_ids(tmp_path) == ()
    write("config.json", eos_token_id=7)
    write("generation_config.json", eos_token_id=[7, 9])
    write("tokenizer_config.json", eos_token="<end>")
    write("tokenizer.json", added_tokens=[{"id": 11, "content": "<end>"}])
    assert end_token_ids(tmp_path) == read_config(tmp_path).eos_token_ids == (7, 9, 11)
    write(
        "tokenizer_config.json",
        eos_token={"content": "</s>"},
        added_tokens_decoder={"5": {"content": "</s>"}},
    )
    assert end_token_ids(tmp_path) == (5, 7, 9)
    write("tokenizer_config.json", eos_token="plain", added_tokens_decoder={})
    write("tokenizer.json", model={"vocab": {"plain": 3}})
    assert end_token_ids(tmp_path) == (3, 7, 9)


def test_ends_of_a_wrapper_reach_the_worker(tmp_path):
    save("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eos_token_id"], config["text_config"]["eos_token_id"] = 2, 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).eos_token_ids == (2, 4)


def test_an_end_token_below_0_is_none(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [-1, 7]}')
    assert end_token_ids(tmp_path) == (7,)
