"""Workers of two ranks on GPUs whose weights stay quantized."""

from __future__ import annotations

import pytest
import torch
from rig import CUDA, save_checkpoint
from test_latent import V3
from test_quantized import MIXTURE, SCHEMES
from test_ranks_on_gpus import MODELS, PLACES, assert_as_near_as_one_rank, in_lockstep, prompts_and_params

from baton.layers.shard import Shard
from baton.models.loader import weight_bytes
from quantizers import write

WEIGHTS = {
    "fp8": (MODELS["128"], "fp8"),
    "int8": ({}, "int8"),
    "int4": ({}, "int4"),
    "glm4-moe int8": (MODELS["glm4-moe"], "int8"),
    "fp8-rows": ({}, SCHEMES["fp8-rows"]),
    "fp8-blocks": ({"head_dim": 128}, SCHEMES["fp8-blocks"]),
    "awq": (MODELS["qwen2"], SCHEMES["awq"]),
    "mixture fp8-rows": (MIXTURE, SCHEMES["fp8-rows"]),
    "mixture fp8-blocks": ({**MIXTURE, "head_dim": 128, "moe_intermediate_size": 256}, SCHEMES["fp8-blocks"]),
    "deepseek-v3 fp8-rows": (V3, SCHEMES["fp8-rows"]),
}
"""Models, and how their weights are quantized, while loading or in the checkpoint."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_bit_of_quantized_weights_is_that_of_parts_added_in_one_process(
    tmp_path, monkeypatch, name, place
):
    model, how = WEIGHTS[name]
    path = save_checkpoint(tmp_path, **model)
    options = {"quantization": how} if isinstance(how, str) else {}
    if not options:
        write(path, None, how)
    both = [
        weight_bytes(path, torch.bfloat16, device=CUDA, shard=Shard(1, 2), quantization=quantization)
        for quantization in (options.get("quantization", "auto"), "none")
    ]
    assert both[0] < 0.8 * both[1], both
    prompts, params = prompts_and_params()
    found = in_lockstep(path, place, monkeypatch, prompts, params, **options)
    assert_as_near_as_one_rank(path, prompts, params, found, [0, 2, 3, 5], **options)
