"""Families with kernels: CUDA graphs, mixed steps, chunks, reused prefixes; against the CPU in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_runner import assert_greedy, greedy

from baton.engine.plan import PlanRow, Pooling, SlotInit, StepPlan
from baton.models.body import why_not_fused
from baton.models.loader import load_model
from rig import (
    CUDA,
    GREEDY,
    assert_nearly_greedy,
    generate,
    make,
    prompts_of,
    reference_logits,
    save_checkpoint,
    strictly,
    tables,
)

_GROUPED = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, object]] = {
    "mistral-window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 48,
    },
    "qwen2-window": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 1,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": 100,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 50,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
        "head_dim": 256,
        "num_attention_heads": 4,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 128,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **_GROUPED,
    },
    "qwen3": {},
}
IN_FLOAT32: dict[str, dict[str, object]] = {
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 64,
        "global_head_dim": 128,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 24,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "rope_parameters": None,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 2048,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "final_logit_softcapping": 30.0,
    },
}
"""Further ones, in float32 alone."""
LENGTHS = (5, 16, 33, 300, 1, 64, 129, 80, 47, 200)
MIXTURES = ("gpt-oss", "glm4-moe")
SEVERAL = (23, 24, 25, 47, 49, 3)
"""Around the windows' borders."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = save_checkpoint(
                tmp_path_factory.mktemp(family), **{**FAMILIES, **IN_FLOAT32}[family]
            )
        return made[family]

    return of


def pair_of(family, dtype):
    return "triton/triton" if dtype == torch.float32 or family == "gemma3" else "mixed/mixed"


@pytest.mark.parametrize("family", [*FAMILIES, *IN_FLOAT32])
@pytest.mark.parametrize("kind", ["graphs", "eager"])
def test_float32_tokens_equal_those_of_the_cpu(checkpoints, family, kind):
    """Prompts in chunks beside decode rows; then the same prompts from the prefix tree."""
    path, prompts = checkpoints(family), prompts_of(*LENGTHS, *SEVERAL)
    params = greedy(len(prompts), 12)
    want = generate(*make(path, "cpu", torch.float32), prompts, params, budget=64)
    runner, cache = make(path, f"{kind}:triton/triton", torch.float32)
    for _ in range(2):
        got = generate(runner, cache, prompts, params, budget=64)
        different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
        # Near ties may be decided otherwise.
        assert len(different) <= 1, different
        assert_greedy(path, prompts, got, 2e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pair", ["mixed/mixed", "triton/triton"])
@pytest.mark.parametrize("body", ["fused", "modules"])
def test_sixteen_bits_are_greedy_by_float32_logits(checkpoints, monkeypatch, family, dtype, pair, body):
    path, prompts = checkpoints(family), prompts_of(*LENGTHS, *SEVERAL)
    params = greedy(len(prompts), 12)
    if body == "modules":
        monkeypatch.setattr("baton.models.body.why_not_fused", lambda model: "for this test")
    elif family == "gemma3":
        pytest.skip("has no fused body")
    runner, cache = make(path, f"graphs:{pair}", dtype)
    for _ in range(2):
        got = generate(runner, cache, prompts, params, budget=64)
        if family in MIXTURES:
            assert_nearly_greedy(path, prompts, got)
        else:
            assert_greedy(path, prompts, got, 0.5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_prompt_and_decode_steps(checkpoints, family, dtype):
    """Of one row that decodes by graph what its prompt's last tokens were."""
    path, (tokens,) = checkpoints(family), prompts_of(120, seed=3)
    runner, _ = make(path, f"graphs:{pair_of(family, dtype)}", dtype)
    want = reference_logits(path, tokens)[99:]
    pages, got = tables(runner, 3, 8), []
    row = PlanRow(0, tuple(tokens[:100]), 0, pages, (0,))
    runner.read(runner.launch(StepPlan(1, (row,), (SlotInit(0, GREEDY, 0, (), ()),))))
    got.append(runner.graphs._logits[:1].float().cpu())
    for at in range(100, 120):
        init = SlotInit(0, GREEDY, 0, (), (), tokens[at])
        runner.read(runner.launch(StepPlan(at, (PlanRow(0, None, at, pages, (0,)),), (init,))))
        got.append(runner.graphs._logits[:1].float().cpu())
    difference = (torch.cat(got) - want).abs()
    if dtype == torch.float32:
        assert difference.max().item() < 1e-3
    elif family in MIXTURES:
        assert difference.median().item() < 0.1
    else:
        assert difference.max().item() < 0.4


def test_which_families_have_fused_kernels(checkpoints):
    fused = {
        family
        for family in FAMILIES
        if why_not_fused(load_model(checkpoints(family), torch.bfloat16, CUDA)) is None
    }
    assert fused == FAMILIES.keys() - {"gemma3"}


@pytest.mark.parametrize(("family", "enough"), [("mistral-window", 24), ("gemma3", 72)])
def test_pages_that_have_left_the_window_are_given_up(checkpoints, family, enough):
    """Two sequences of 500 tokens in pools that are too small for all their pages, in which others lay."""
    path, prompts = checkpoints(family), prompts_of(380, 400, seed=5)
    params = [dataclasses.replace(GREEDY, max_tokens=120)] * 2
    runner, cache = make(path, "graphs:triton/triton", torch.float32, num_pages=enough)
    runner._pool.groups[0].pages.fill_(torch.nan)
    groups = runner._pool.layout.groups
    assert sum(group.spec.window is not None for group in groups) and enough < 2 * 32 * len(groups)
    got = generate(runner, cache, prompts, params, budget=64)
    assert_greedy(path, prompts, got, 2e-3)


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "gemma3"])
def test_embeddings_equal_those_of_the_cpu(checkpoints, family):
    path, (tokens,) = checkpoints(family), prompts_of(50, seed=4)
    for pooling in (Pooling.LAST, Pooling.MEAN):
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            kind = "cpu" if dtype == torch.float32 else f"graphs:{pair_of(family, dtype)}"
            runner, _ = make(path, kind, dtype)
            row = PlanRow(0, tuple(tokens), 0, tables(runner, 0, 4), pooling=pooling)
            (result,) = runner.read(runner.launch(StepPlan(1, (row,)))).rows
            assert result.error is None
            results.append(torch.from_numpy(result.pooled))
        assert torch.nn.functional.cosine_similarity(*results, dim=0).item() > 0.999


@pytest.mark.parametrize("family", ["gpt-oss", "gemma3"])
def test_launching_never_waits_for_the_device(checkpoints, family):
    prompts = prompts_of(*LENGTHS[:5])
    params = [dataclasses.replace(GREEDY, max_tokens=6)] * len(prompts)
    for kind in ("graphs", "eager"):
        pair = pair_of(family, torch.bfloat16)
        runner, cache = make(checkpoints(family), f"{kind}:{pair}", torch.bfloat16)
        generate(runner, cache, prompts, params, around=strictly, budget=64)
