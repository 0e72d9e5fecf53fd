"""Models with recurrent layers on a GPU against the CPU in float32: decode rows beside chunks, cached
prefixes, retraction, pages that change their group."""

from __future__ import annotations

import pytest
import torch
from test_runner import greedy

from baton.config import WorkerConfig
from baton.engine.plan import PlanRow
from baton.engine.request import EngineRequest
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.worker.engine import build_engine
from rig import CONTEXT, generate, make, prompts_of, save_checkpoint, tables

_DELTA_NET = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 64,
}
_GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "head_dim": None,
    "num_attention_heads": 4,
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 48,
    "mamba_expand": 2,
    "shared_intermediate_size": 128,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
FAMILIES = {
    "qwen3-next": {
        **_DELTA_NET,
        **_EXPERTS,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "mlp_only_layers": [1],
    },
    "qwen3.5": {
        **_DELTA_NET,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "qwen3.5-moe": {
        **_DELTA_NET,
        **_EXPERTS,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 128,
    },
    "granite4": {**_GRANITE, "num_local_experts": 0, "mamba_n_groups": 2, "position_embedding_type": "rope"},
    "granite4-moe": {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3, "mamba_n_groups": 1},
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_L_cache": 3,
        "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-6,
    },
}
LENGTHS = (5, 16, 33, 300, 1, 64, 129, 80, 47, 200)
KINDS = ("triton", "eager:triton/triton", "graphs:triton/triton")
"""Of `rig.make`."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = save_checkpoint(tmp_path_factory.mktemp(family), **FAMILIES[family])
        return made[family]

    return of


def assert_close(got, want, most=1):
    """Near ties may be decided otherwise."""
    different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    assert len(different) <= most, different


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_float32_tokens_equal_those_of_the_cpu(checkpoints, family, kind, page_size):
    """Prompts in chunks beside decode rows, over pages that hold no numbers at first; then the same prompts
    from the prefix tree, and prompts that go on where those end."""
    path, prompts = checkpoints(family), prompts_of(*LENGTHS)
    params = greedy(len(prompts), 12)
    want = generate(*make(path, "cpu", torch.float32), prompts, params, budget=64)
    runner, cache = make(path, kind, torch.float32, page_size=page_size, poison=torch.nan)
    for _ in range(2):
        assert_close(generate(runner, cache, prompts, params, budget=64), want)
    longer = [[*p, *o, 7] for p, o in zip(prompts, want, strict=True)]
    want = generate(*make(path, "cpu", torch.float32), longer, params, budget=256)
    assert_close(generate(runner, cache, longer, params, budget=256), want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_were_retracted_go_on(checkpoints, family, kind):
    """In a pool that is too small for all."""
    path, prompts = checkpoints(family), prompts_of(60, 50, 70, 40, 65, 30)
    params = greedy(len(prompts), 60)
    want = generate(*make(path, "cpu", torch.float32), prompts, params)
    groups = len(make(path, "cpu", torch.float32)[0]._pool.layout.groups)
    runner, cache = make(path, kind, torch.float32, num_pages=6 * groups + 9)
    config = SchedulerConfig(context_length=CONTEXT, token_budget=64, max_rows=6, output_margin=8)
    scheduler = Scheduler(cache, config)
    assert_close(answered(scheduler, runner, prompts, params), want)
    assert scheduler.retractions


def answered(scheduler, runner, prompts, params):
    output = [[] for _ in prompts]
    for key, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        scheduler.submit(EngineRequest(key, tuple(prompt), own))
    while scheduler.requests:
        step = scheduler.plan()
        assert step is not None
        scheduler.commit(step, runner.read(runner.launch(step.plan)))
        for event in scheduler.take_events():
            if hasattr(event, "token"):
                output[event.sequence.request.key].append(event.token)
    return output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine(checkpoints, family, dtype):
    """Its pool, its attention and its first steps; its answers nearly those of the CPU in float32."""
    path, prompts = checkpoints(family), prompts_of(20, 100, 33)
    params = greedy(len(prompts), 8)
    config = WorkerConfig(
        model=str(path), device="cuda", dtype=dtype, kv_tokens=8192, max_rows=8, token_budget=128
    )
    engine = build_engine(config, 1)
    assert engine.attention == "prefill=triton decode=triton" and engine.runner.graphs is not None
    got = generate(engine.runner, engine.cache, prompts, params, budget=64)
    alone = generate(engine.runner, engine.cache, prompts[:1], params[:1])  # rows of one are fused otherwise
    engine.close()
    if dtype == "float32":
        assert_close(got, generate(*make(path, "cpu", torch.float32), prompts, params))
    else:
        assert_nearly_greedy(path, [*prompts, prompts[0]], got + alone)


def assert_nearly_greedy(path, prompts, outputs):
    """As the CPU's logits in float32 say."""
    gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        runner, _ = make(path, "cpu", torch.float32)
        row = PlanRow(0, tuple(prompt + output), 0, tables(runner, 0, 64))
        logits = runner._body.logits(runner.hidden_states(row))[len(prompt) - 1 : -1]
        gaps.append(logits.amax(1) - logits.gather(1, torch.tensor(output)[:, None]).squeeze(1))
    gap = torch.cat(gaps)
    shares = (gap > 0.5).float().mean().item(), (gap > 0).float().mean().item()
    assert shares[0] <= 0.05 and shares[1] <= 0.25, shares
