"""Mixtures of experts on fused kernels against the layer's definition, in float32, or float64 of 4 bits."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from baton.layers.mlp import GatedMlp
from baton.layers.moe import ClampedSwiglu, Experts, GatedExpert, Mixture
from baton.layers.moe_routing import MoeGate, Routing
from baton.layers.parameters import Parameters
from baton.layers.quantization.weight_method import QuantizedWeight, WeightMethod, WeightPlan
from baton.layers.tensor_parallel import ONE_RANK, Shard
from rig import CUDA, GREEDY, assert_nearly_greedy, generate, make, prompts_of, save_checkpoint

SHAPES = {
    "softmax": (16, 4, 256, 128, Routing(4), {}),
    "odd": (12, 3, 200, 88, Routing(3, renormalize=False), {}),
    "bias": (16, 2, 256, 96, Routing(2), {"bias": True}),
    "sigmoid": (32, 6, 256, 64, Routing(6, "sigmoid", scale=1.7), {"correction": True, "float32": True}),
    "groups": (
        16,
        3,
        256,
        64,
        Routing(3, "sigmoid", groups=4, top_groups=2, group_best=2),
        {"correction": True, "float32": True},
    ),
    "large": (128, 8, 2048, 768, Routing(8), {}),
    "qwen3.5": (256, 8, 2048, 512, Routing(8), {}),
    "gpt-oss": (16, 4, 360, 184, Routing(4), {"bias": True}),
}


def mixture_of(name, shared=False, dtype=torch.bfloat16, shard=ONE_RANK, gated=0):
    """`gated`: inner values of a shared expert with a gate."""
    count, _, hidden, inner, routing, options = SHAPES[name]
    parameters = Parameters(dtype, CUDA, shard=shard)
    router = MoeGate(parameters, "gate", hidden, count, routing, **options)
    clamped = name == "gpt-oss"
    activation = ClampedSwiglu(1.702, 1.0) if clamped else "silu"
    experts = Experts(parameters.under("experts"), count, hidden, inner, bias=clamped, activation=activation)
    own = GatedMlp(parameters.under("shared"), hidden, 2 * inner) if shared else None
    if gated:
        own = GatedExpert(parameters, "shared", hidden, gated)
    torch.manual_seed(count)
    for parameter in parameters.table.values():
        parameter.target.normal_(0, 1.5 / parameter.target.shape[-1] ** 0.5)
    return Mixture(router, experts, own), hidden


def reference(mixture, x):
    """float32, and whether the choice of each token is clear: not a matter of rounding."""
    router = copy.copy(mixture.router)
    linear = router.linear
    bias = None if linear.bias is None else linear.bias.float()
    logits = F.linear(x.float(), linear.weight.float(), bias)
    weights, chosen = router.routing.choose(logits, router.correction)
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(mixture.experts.count):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        experts, own = mixture.experts, x[token].float()
        gate, up = F.linear(own, experts.gate_up[expert].float()).chunk(2, -1)
        if experts.gate_up_bias is None:
            out = F.linear(F.silu(gate) * up, experts.down[expert].float())
        else:
            gate = (gate + experts.gate_up_bias[expert, : experts.inner].float()).clamp(max=1.0)
            up = (up + experts.gate_up_bias[expert, experts.inner :].float()).clamp(-1.0, 1.0)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            out = F.linear(inner, experts.down[expert].float(), experts.down_bias[expert].float())
        total.index_add_(0, token, out * weights[token, place][:, None])
    if mixture.shared is not None:
        shared, share = mixture.shared, 1.0
        if isinstance(shared, GatedExpert):
            shared, share = shared.mlp, F.linear(x.float(), shared.gate.weight.float()).sigmoid()
        gate, up = F.linear(x.float(), shared.gate_up.weight.float()).chunk(2, -1)
        total += F.linear(F.silu(gate) * up, shared.down.weight.float()) * share
    nearby = [
        router.routing.choose(logits + 0.02 * torch.randn_like(logits), router.correction)[1]
        for _ in range(8)
    ]
    clear = torch.stack([(c.sort(-1).values == chosen.sort(-1).values).all(-1) for c in nearby]).all(0)
    return total, clear


def clear_rows(mixture, count, hidden):
    """So many rows whose choice is clear, and what they should give."""
    x = torch.randn(8 * count + 64, hidden, device=CUDA).bfloat16()
    want, clear = reference(mixture, x)
    assert clear.sum() >= count
    return x[clear][:count].contiguous(), want[clear][:count]


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("tokens", [1, 4, 40, 300, 2500])
@pytest.mark.parametrize(("name", "shared"), [*((name, False) for name in SHAPES), ("sigmoid", True)])
def test_parts_equal_the_layer(name, shared, tokens):
    from baton.models.fused_mixture import FusedMixture

    mixture, hidden = mixture_of(name, shared)
    x, want = clear_rows(mixture, tokens, hidden)
    fused = FusedMixture(mixture)
    for _ in range(2):  # the second time in memory that the first has used
        assert error(fused.parts(x).float().sum(0), want) < 1.5e-2
    assert error(mixture(x), want) < 1.5e-2


GATED = [("qwen3.5", 512), ("softmax", 128), ("odd", 40)]
"""Shared experts with a gate: of the others' size, and of another one, by themselves then."""


@pytest.mark.parametrize("tokens", [1, 4, 40, 300, 2500])
@pytest.mark.parametrize(("name", "inner"), GATED)
@pytest.mark.parametrize("invariant", [False, True])
def test_parts_with_a_gated_shared_expert(name, inner, tokens, invariant):
    from baton.models.fused_mixture import FusedMixture

    mixture, hidden = mixture_of(name, gated=inner)
    x, want = clear_rows(mixture, tokens, hidden)
    assert error(FusedMixture(mixture, invariant).parts(x).float().sum(0), want) < 1.5e-2
    assert error(mixture(x), want) < 1.5e-2


@pytest.mark.parametrize("tokens", [1, 4, 40, 300, 2500])
@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_ranks_with_whole_experts_add_up(name, tokens):
    from baton.models.fused_mixture import FusedMixture

    whole, hidden = mixture_of(name)
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    total = torch.zeros(tokens, hidden, device=CUDA)
    for rank in range(2):
        mixture, _ = mixture_of(name, shard=Shard(rank, 2, ep=True))
        ours, everyone = mixture.experts, whole.experts
        own = slice(ours.first, ours.first + ours.count)
        for part in ("gate_up", "down", "gate_up_bias", "down_bias"):
            if getattr(ours, part) is not None:
                getattr(ours, part).copy_(getattr(everyone, part)[own])
        fused = FusedMixture(Mixture(whole.router, ours))
        for _ in range(2):  # the second time in memory that the first has used
            parts = fused.parts(x)
        total += parts.float().sum(0)
    assert ours.count == everyone.count // 2
    assert error(total, FusedMixture(whole).parts(x).float().sum(0)) < 1e-2


@pytest.mark.parametrize(
    ("name", "shared", "gated"),
    [
        *((name, shared, 0) for name in SHAPES for shared in (False, True)),
        *((*each[:1], False, each[1]) for each in GATED),
    ],
)
def test_one_token(name, shared, gated):
    from baton.models.fused_mixture import FusedMixture

    mixture, hidden = mixture_of(name, shared, gated=gated)
    fused, norm, checked = FusedMixture(mixture), torch.rand(hidden, device=CUDA).bfloat16() + 0.5, 0
    for seed in range(30):
        torch.manual_seed(seed)
        residual = torch.randn(1, hidden, device=CUDA).bfloat16()
        want, clear = reference(mixture, F.rms_norm(residual.float(), (hidden,), norm.float(), 1e-6))
        if clear.all() and checked < 5:
            checked += 1
            got = residual.clone()
            fused.add_one(got, norm, 1e-6)
            assert error(got, residual.float() + want) < 1e-2
    assert checked


@pytest.mark.parametrize("gated", [0, 768])
def test_invariant_rows_do_not_depend_on_others(gated):
    from baton.models.fused_mixture import FusedMixture

    mixture, hidden = mixture_of("large", gated=gated)
    fused = FusedMixture(mixture, invariant=True)
    x = torch.randn(3000, hidden, device=CUDA).bfloat16()
    whole = fused.parts(x)
    assert error(whole.float().sum(0), mixture(x).float()) < 0.1
    for first, end in ((0, 1), (7, 9), (100, 164), (1000, 1700)):
        assert torch.equal(fused.parts(x[first:end]), whole[:, first:end])


def test_logits_that_are_no_numbers_stay_in_their_row():
    from baton.models.fused_mixture import FusedMixture

    mixture, hidden = mixture_of("softmax")
    fused = FusedMixture(mixture)
    for tokens in (2, 40, 1500):
        x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
        want = fused.parts(x).float().sum(0)
        x[1] = torch.nan
        got = fused.parts(x).float().sum(0)
        assert got[1].isnan().all()
        others = torch.arange(tokens, device=CUDA) != 1
        assert error(got[others], want[others]) < 1e-2


FOUR_BITS = {
    "32": (12, 160, 96, Routing(3, renormalize=False), {}),
    "64": (16, 320, 192, Routing(4), {"bias": True}),
    "128": (16, 384, 256, Routing(1, "sigmoid", scale=1.7), {"correction": True, "float32": True}),
    "256": (8, 512, 256, Routing(2, "sigmoid", groups=4, top_groups=2, group_best=2), {"float32": True}),
    "128 of many": (128, 2048, 768, Routing(8), {}),
}
"""By the columns of a group. Neither rows nor columns divide into tiles everywhere."""


def four_bits_of(name, shard=ONE_RANK):
    count, hidden, inner, routing, options = FOUR_BITS[name]
    plan = WeightPlan(WeightMethod(4, int(name.split()[0])), on_gpu=True)
    parameters = Parameters(torch.bfloat16, CUDA, plan=plan, shard=shard)
    router = MoeGate(parameters, "gate", hidden, count, routing, **options)
    experts = Experts(parameters.under("experts"), count, hidden, inner)
    torch.manual_seed(count)
    for parameter in parameters.table.values():
        target, spread = parameter.target, 1.5 / parameter.target.shape[-1] ** 0.5
        if isinstance(target, QuantizedWeight):
            target.fill(0, spread * torch.randn(target.shape, device=CUDA))
        else:
            target.normal_(0, spread)
    return Mixture(router, experts), hidden


def reference_of_4_bits(experts, x, weights, chosen):
    gate_up, down = (
        merged.unpacked().dequantize().double().view(experts.count, -1, merged.shape[1])
        for merged in experts.merged
    )
    total = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(experts.count):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].t()).chunk(2, -1)
        total.index_add_(0, token, F.silu(gate) * up @ down[expert].t() * weights[token, place][:, None])
    return total


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40, 300, 2500])
@pytest.mark.parametrize("name", FOUR_BITS)
def test_experts_of_4_bits(name, tokens, invariant):
    from baton.layers.kernels.moe_align import choose
    from baton.models.fused_mixture import FusedMixture

    mixture, hidden = four_bits_of(name)
    fused = FusedMixture(mixture, invariant)
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    weights, chosen = choose(mixture.router, fused._scores(x))
    want = reference_of_4_bits(mixture.experts, x, weights, chosen)
    for _ in range(2):  # the second time in memory that the first has used
        got = fused.parts(x)
        assert error(got.double().sum(0), want) < 1e-2
    if invariant and tokens > 5 and name in ("32", "128 of many"):  # other routers' scores are torch's
        assert torch.equal(fused.parts(x[3:5]), got[:, 3:5])


@pytest.mark.parametrize("name", FOUR_BITS)
def test_one_token_of_4_bits(name):
    from baton.layers.kernels import moe_small_batch

    mixture, hidden = four_bits_of(name)
    norm = torch.rand(hidden, device=CUDA).bfloat16() + 0.5
    x, held = (torch.randn(1, hidden, device=CUDA).bfloat16() for _ in range(2))
    logits = torch.randn(1, mixture.experts.count, device=CUDA)
    inner, weights, chosen = moe_small_batch.gate_up_one(
        x, norm, 1e-6, logits, mixture.router, mixture.experts
    )
    out = held.clone()
    moe_small_batch.down(inner, mixture.experts, weights, chosen, out, add=True)
    normed = x.double() * torch.rsqrt(x.double().square().mean() + 1e-6) * norm.double()
    want = held.double() + reference_of_4_bits(mixture.experts, normed, weights, chosen)
    assert error(out, want) < 1e-2


@pytest.mark.parametrize("tokens", [1, 4, 40, 2500])
@pytest.mark.parametrize("name", FOUR_BITS)
def test_ranks_with_whole_experts_of_4_bits_add_up(name, tokens):
    from baton.models.fused_mixture import FusedMixture

    whole, hidden = four_bits_of(name)
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    total = torch.zeros(tokens, hidden, device=CUDA)
    for rank in range(2):
        ours = four_bits_of(name, Shard(rank, 2, ep=True))[0].experts
        for own, everyone in zip(ours.merged, whole.experts.merged, strict=True):
            part = everyone.rows(rank * len(own.codes), len(own.codes))
            for part_of in ("codes", "scale", "zero"):
                getattr(own, part_of).copy_(getattr(part, part_of))
        total += FusedMixture(Mixture(whole.router, ours)).parts(x).float().sum(0)
    assert error(total, FusedMixture(whole).parts(x).float().sum(0)) < 1e-2


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("mixture"), **MIXTURE)


@pytest.mark.parametrize("kind", ["fa3", "graphs", "eager", "invariant"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_runner_is_greedy_by_float32_logits(checkpoint, kind, overlap):
    """Rounding may change which experts a token uses, so that a few tokens lie further off than in a dense
    model; the general body ("fa3") is held to the same."""
    prompts = prompts_of(5, 16, 33, 300, 1, 64, 129, 80, 47, 200)
    params = [dataclasses.replace(GREEDY, max_tokens=24 + i % 3) for i in range(len(prompts))]
    got = generate(*make(checkpoint, kind, torch.bfloat16, page_size=64), prompts, params, overlap=overlap)
    assert [len(tokens) for tokens in got] == [p.max_tokens for p in params]
    assert_nearly_greedy(checkpoint, prompts, got)


def test_long_steps_are_launched_by_graph(checkpoint, monkeypatch):
    runner, cache = make(checkpoint, "graphs", torch.bfloat16, page_size=64)
    monkeypatch.setattr(runner, "_eager", None)
    prompts = prompts_of(700, 900)
    got = generate(runner, cache, prompts, [GREEDY, GREEDY], budget=1024)
    assert_nearly_greedy(checkpoint, prompts, got)


def test_invariant_tokens_do_not_depend_on_the_batch(checkpoint):
    prompts = prompts_of(5, 33, 129, 80, 200)
    params = [dataclasses.replace(GREEDY, max_tokens=24) for _ in prompts]
    together = generate(*make(checkpoint, "invariant", torch.bfloat16, page_size=64), prompts, params)
    for prompt, own, tokens in zip(prompts, params, together, strict=True):
        alone = generate(*make(checkpoint, "invariant", torch.bfloat16, page_size=64), [prompt], [own])
        assert alone == [tokens]
