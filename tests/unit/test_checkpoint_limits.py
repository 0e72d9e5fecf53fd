"""Checkpoints made to harm: each ends in one line, soon, whoever reads it."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from baton.checkpoint_limits import MAX_ADDED_TOKENS, check_sizes, check_tokenizer
from baton.demo import model_path
from baton.model_path import CheckpointError
from baton.models.config import read_config
from baton.models.loader import load_model
from baton.models.tensor_files import tensor_files
from baton.tokenizer import hf_tokenizer

SECONDS = 10.0
WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path):
    """A copy of the demo model whose files may be changed."""
    return Path(shutil.copytree(model_path(), tmp_path / "model"))


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(read, path):
    """The line."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert time.monotonic() - began < SECONDS
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500
    return line


@pytest.mark.parametrize("read", [read_config, hf_tokenizer.load])
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is beyond 512"),
        ({"head_dim": 10**9}, "head_dim is beyond"),
        ({"hidden_size": 2**40}, "hidden_size is beyond"),
        ({"vocab_size": 10**9}, "vocab_size is beyond"),
        ({"num_attention_heads": 10**8}, "num_attention_heads is beyond"),
        ({"num_key_value_heads": 10**8}, "num_key_value_heads is beyond"),
        ({"intermediate_size": 10**12}, "intermediate_size is beyond"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings is beyond"),
        ({"text_config": {"num_hidden_layers": -(10**6)}}, "num_hidden_layers is beyond"),
        ({"num_hidden_layers": 512, "num_experts": 4096}, "512 layers of 4096 experts"),
        ({"eos_token_id": 10**400}, "eos_token_id is beyond"),
    ],
)
def test_sizes_beyond_any_models(model, read, values, text):
    change(model / "config.json", **values)
    found = refused(read, model)
    assert re.search(text, found), found


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json"])
def test_files_that_are_nested_too_deep(model, file):
    (model / file).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert file in refused(hf_tokenizer.load, model)
    if file == "config.json":
        assert file in refused(read_config, model)
        (model / file).write_text('{"a":' + "[" * 500 + "]" * 500 + "}")
        assert file in refused(read_config, model)


@pytest.mark.parametrize("layers", [512])
def test_the_largest_that_is_tried_ends_soon(model, layers):
    """Its weights are not there."""
    change(model / "config.json", num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    assert "lacks tensor" in refused(lambda path: load_model(path, torch.bfloat16), model)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside.safetensors", "a/../../b", "sub/x"])
def test_an_index_names_no_file_elsewhere(model, name):
    (model.parent / "outside.safetensors").write_bytes((model / WEIGHTS).read_bytes())
    index = {"weight_map": {"model.embed_tokens.weight": name, "model.norm.weight": WEIGHTS}}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "no file beside it" in refused(tensor_files, model)


def added(count):
    return [{"id": 4096 + i, "content": f"<|{i}|>", "special": True} for i in range(count)]


def test_added_tokens_beyond_any_tokenizers(model):
    change(model / "tokenizer.json", added_tokens=added(MAX_ADDED_TOKENS + 1))
    assert f"it adds {MAX_ADDED_TOKENS + 1} tokens" in refused(hf_tokenizer.load, model)
    shutil.copy(model_path() / "tokenizer.json", model / "tokenizer.json")
    decoder = {str(token["id"]): token for token in added(MAX_ADDED_TOKENS + 1)}
    change(model / "tokenizer_config.json", added_tokens_decoder=decoder)
    assert "tokenizer_config.json" in refused(hf_tokenizer.load, model)


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "steps",
    [
        [replace({"String": "a"}, "aa")] * 40,
        [replace({"String": "a"}, "a" * 10**5)],
        [replace({"Regex": ""}, "xx")] * 20,
        [{"type": "Sequence", "normalizers": [replace({"Regex": "."}, "xx")] * 20}],
    ],
)
def test_replacements_that_multiply(model, part, steps):
    key = f"{part}s"
    change(model / "tokenizer.json", **{part: {"type": "Sequence", key: steps}})
    assert f"its {part} makes up to" in refused(hf_tokenizer.load, model)


def test_replacements_of_real_tokenizers_are_taken(tmp_path):
    """Llama 2's, Gemma's and T5's kinds."""
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        replace({"String": " "}, "▁"),
        replace({"Regex": " {2,}"}, " "),
        replace({"String": "``"}, '"'),
    ]
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"normalizer": {"type": "Sequence", "normalizers": steps}})
    )
    check_tokenizer(tmp_path)


def test_sizes_of_the_largest_models_are_taken():
    deepseek = {"num_hidden_layers": 61, "n_routed_experts": 256, "vocab_size": 129_280, "kv_lora_rank": 512}
    kimi = {"num_hidden_layers": 61, "n_routed_experts": 384, "max_position_embeddings": 262_144}
    scout = {"text_config": {"max_position_embeddings": 10_485_760, "num_local_experts": 16}}
    dense = {"num_hidden_layers": 126, "hidden_size": 16_384, "intermediate_size": 53_248}
    for config in (
        deepseek,
        kimi,
        scout,
        dense,
        {"eos_token_id": -1, "quantization_config": {"group_size": -1}},
    ):
        check_sizes(Path("config.json"), config)
