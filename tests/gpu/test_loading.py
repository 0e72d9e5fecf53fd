"""Checkpoints read onto a GPU through pinned pieces: the same weights as on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.layers import async_copy
from baton.models.loader import load_model
from rig import CUDA, save_checkpoint


@pytest.mark.parametrize("piece", [4096, 16 * 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive(tmp_path, monkeypatch, piece, dtype):
    path = save_checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    for i in range(3):
        save_file({name: tensors[name] for name in names[i::3]}, path / f"{i}.safetensors")
    index = {name: f"{at % 3}.safetensors" for at, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    monkeypatch.setattr(async_copy, "_PIECE", piece)
    model = load_model(path, dtype, CUDA)
    layers = "model.layers.1.self_attn"
    parts = [tensors[f"{layers}.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(model.layers[1].attention.input.weight.cpu(), torch.cat(parts).to(dtype))
    assert torch.equal(model.embedding.cpu(), tensors["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(model.head.weight.cpu(), tensors["lm_head.weight"].to(dtype))
    norm = model.layers[1].attention.qk_norm
    assert torch.equal(norm[7].cpu(), tensors[f"{layers}.q_norm.weight"].to(dtype))
    assert torch.equal(norm[9].cpu(), tensors[f"{layers}.k_norm.weight"].to(dtype))
