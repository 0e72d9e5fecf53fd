"""gpt-oss checkpoints with MXFP4 experts."""

from __future__ import annotations

import json

import pytest
import torch
from random_checkpoints import check_logits, save_checkpoint
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.models.config import ModelError, read_config
from baton.models.mxfp4 import dequantize


def packed(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)


def test_dequantize_equals_transformers():
    blocks, scales = packed((3, 10, 4), 1)
    scales[0, 0] = torch.tensor([0, 1, 200, 254], dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(dequantize(blocks, scales), expected)
    assert dequantize(torch.tensor([[0x2F] * 16], dtype=torch.uint8), torch.tensor([128]))[:2].tolist() == [
        -12,
        2,
    ]


@pytest.fixture
def checkpoint(tmp_path):
    """Experts in MXFP4, the scales of one tensor in another file than its blocks; and the model itself."""
    model = save_checkpoint("gpt-oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for seed, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales = packed((experts, rows, columns // 32), seed)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        weights = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(weights)
    names = sorted(tensors)
    half = next(i for i, name in enumerate(names) if name.endswith("_scales"))
    files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, model


def test_logits_equal_transformers_on_the_dequantized_weights(checkpoint):
    path, model = checkpoint
    check_logits(path, model)


def test_transformers_code_does_not_serve_it(checkpoint):
    path, _ = checkpoint
    with pytest.raises(ModelError, match="quantized by 'mxfp4'"):
        read_config(path, implementation="transformers")
