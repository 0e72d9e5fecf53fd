"""Mixtures of experts against the modules of transformers, routing by routing."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from baton.layers.mlp import GatedMlp
from baton.layers.moe import ClampedSwiglu, Experts, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.parameters import Parameters

HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 8, 3


def randomize(module):
    """Returns the tensors of the checkpoint by name."""
    torch.manual_seed(1)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.normal_(0.0, 1.5 / math.sqrt(tensor.shape[-1]) if tensor.dim() > 1 else 0.3)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        if tensors[name].shape[1] in (2 * INNER, HIDDEN) and "experts.gate_up_proj_bias" not in tensors:
            for expert, tensor in enumerate(tensors.pop(name)):
                if name.endswith("down_proj"):
                    tensors[f"experts.{expert}.down_proj.weight"] = tensor
                else:
                    tensors[f"experts.{expert}.gate_proj.weight"] = tensor[:INNER]
                    tensors[f"experts.{expert}.up_proj.weight"] = tensor[INNER:]
    return tensors


def fill(parameters, tensors):
    assert parameters.table.keys() == tensors.keys()
    for name, parameter in parameters.table.items():
        tensor = tensors[name].detach()
        assert tensor.shape == parameter.shape
        parameter.target.copy_(parameter.convert(tensor) if parameter.convert else tensor)


def check(module, mixture, parameters):
    fill(parameters, randomize(module))
    x = torch.randn(1, 50, HIDDEN)
    with torch.no_grad():
        want = module.eval()(x)
    want = (want[0] if isinstance(want, tuple) else want)[0]
    got = mixture(x[0])
    tolerance = 1e-6 * want.abs().max()
    assert (got - want).abs().max() < tolerance
    routed = mixture.router(x[0])
    dense = mixture.experts.dense(x[0], *routed)
    assert (dense - mixture.experts(x[0], *routed)).abs().max() < tolerance
    residual = torch.randn(50, HIDDEN)
    assert (mixture.add_to(residual.clone(), x[0]) - want - residual).abs().max() < tolerance
    # A token's result does not depend on the others.
    assert (mixture(x[0, 7:8]) - got[7:8]).abs().max() < tolerance


def declared():
    return Parameters(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_deepseek_v3(groups, renormalize):
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    parameters = declared()
    routing = Routing(TOP_K, "sigmoid", renormalize, 2.5, *groups, group_best=2)
    router = MoeGate(parameters, "gate", HIDDEN, EXPERTS, routing, correction=True, float32=True)
    experts = Experts(parameters.under("experts"), EXPERTS, HIDDEN, INNER)
    mixture = Mixture(router, experts, GatedMlp(parameters.under("shared_experts"), HIDDEN, INNER))
    check(DeepseekV3MoE(config), mixture, parameters)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_deepseek_v2(groups):
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=2,
        topk_method="greedy" if groups == (1, 1) else "group_limited_greedy",
        n_group=groups[0],
        topk_group=groups[1],
        routed_scaling_factor=16.0,
    )
    parameters = declared()
    routing = Routing(TOP_K, renormalize=False, scale=16.0, groups=groups[0], top_groups=groups[1])
    router = MoeGate(parameters, "gate", HIDDEN, EXPERTS, routing, float32=True)
    experts = Experts(parameters.under("experts"), EXPERTS, HIDDEN, INNER)
    mixture = Mixture(router, experts, GatedMlp(parameters.under("shared_experts"), HIDDEN, 2 * INNER))
    check(DeepseekV2Moe(config), mixture, parameters)


def test_gpt_oss():
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    parameters = declared()
    router = MoeGate(parameters, "router", HIDDEN, EXPERTS, Routing(TOP_K), bias=True)
    swiglu = ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit)
    below = parameters.under("experts")
    experts = Experts(below, EXPERTS, HIDDEN, INNER, projections=None, bias=True, activation=swiglu)
    check(GptOssMLP(config), Mixture(router, experts), parameters)


def test_gpt_oss_clamps():
    swiglu = ClampedSwiglu(1.702, 7.0)
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([-8.0, 9.0, 0.5])
    silu = torch.tensor([7.0, -9.0, 1.0]) * torch.sigmoid(torch.tensor([7.0, -9.0, 1.0]) * 1.702)
    assert torch.equal(swiglu(gate, up), torch.tensor([-6.0, 8.0, 1.5]) * silu)
