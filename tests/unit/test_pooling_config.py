"""Checkpoints for embeddings: modules.json of sentence-transformers, and a body without a head."""

from __future__ import annotations

import json

import pytest
from random_checkpoints import check_logits, save_checkpoint
from safetensors.torch import load_file, save_file

from baton.model_path import CheckpointError
from baton.models.config import read_config
from baton.models.loader import check_tensors
from baton.models.pooling_config import PoolingConfig, read_pooling

TRANSFORMER, POOLING, NORMALIZE, DENSE = (
    {"path": path, "type": f"sentence_transformers.models.{kind}"}
    for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize"), ("2", "Dense"))
)
LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
MEAN = {"pooling_mode_mean_tokens": True}


def write(folder, modules, pooling):
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    "modules, pooling, expected",
    [
        ([TRANSFORMER, POOLING, NORMALIZE], {**LAST, "include_prompt": False}, PoolingConfig("last", True)),
        ([TRANSFORMER, POOLING], MEAN, PoolingConfig("mean", False)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, PoolingConfig("last", False)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "mean"}, PoolingConfig("mean", False)),
    ],
)
def test_what_is_read(tmp_path, modules, pooling, expected):
    assert read_pooling(tmp_path) == PoolingConfig("last", True)
    write(tmp_path, modules, pooling)
    assert read_pooling(tmp_path) == expected


@pytest.mark.parametrize(
    "modules, pooling, words",
    [
        ([TRANSFORMER, POOLING, DENSE], LAST, "modules Transformer, Pooling, Dense; supported"),
        ([TRANSFORMER], LAST, "supported are Transformer, Pooling"),
        ([7], LAST, "supported are Transformer"),
        ({}, LAST, "not a JSON list"),
        ([TRANSFORMER, {**POOLING, "path": "../x"}], LAST, "no folder beside it"),
        ([TRANSFORMER, {**POOLING, "path": "elsewhere"}], LAST, "cannot read"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "asks for pooling cls"),
        ([TRANSFORMER, POOLING], {**LAST, **MEAN}, "asks for pooling lasttoken, mean"),
        ([TRANSFORMER, POOLING], {}, r"asks for pooling \(none\)"),
        ([TRANSFORMER, POOLING], {**MEAN, "include_prompt": False}, "include_prompt"),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(tmp_path, modules, pooling, words):
    write(tmp_path, modules, pooling)
    with pytest.raises(CheckpointError, match=words):
        read_pooling(tmp_path)


def test_names_without_a_prefix(tmp_path):
    """Qwen3-Embedding: architecture Qwen3ForCausalLM, tensors of the body alone."""
    model = save_checkpoint("llama3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    body = {
        name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"
    }
    assert len(body) < len(tensors)  # the head is not tied
    save_file({**body, "lm_head.weight": tensors["lm_head.weight"]}, file, metadata={"format": "pt"})
    check_logits(tmp_path, model)
    save_file(body, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lacks tensor lm_head"):
        check_tensors(tmp_path)
    assert not read_config(tmp_path).embeds_only
    write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], LAST)
    check_tensors(tmp_path)
    assert read_config(tmp_path).embeds_only
