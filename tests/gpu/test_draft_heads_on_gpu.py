"""Heads, layers of multi-token prediction and small models that draft on a GPU, with CUDA graphs and without:
texts are those without drafts."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import DecodeConfig
from baton.engine.draft.heads import HeadDrafter
from baton.engine.draft.planner import DraftPlanner
from baton.engine.sampling_params import SamplingParams
from baton.layers.parameters import Parameters
from baton.models.config import read_config
from baton.models.glm4_moe import build_mtp
from baton.rpc.address import new_incarnation
from baton.worker import draft_model
from baton.worker.decode.drafters import make_drafter
from baton.worker.engine import build_engine
from rig import VOCAB, generate, parameters, prompts_of, save_checkpoint

HIDDEN = 256
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_attention_heads": 4,
    "head_dim": 64,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}


def noise(generator, *shape):
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])


def save_eagle3(path, vocab=VOCAB):
    generator = torch.Generator().manual_seed(3)
    layer = {
        "self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "self_attn.k_proj": (128, 2 * HIDDEN),
        "self_attn.v_proj": (128, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (384, HIDDEN),
        "mlp.up_proj": (384, HIDDEN),
        "mlp.down_proj": (HIDDEN, 384),
    }
    tensors = {f"midlayer.{name}.weight": noise(generator, *shape) for name, shape in layer.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(HIDDEN)
    tensors |= {"fc.weight": noise(generator, HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = noise(generator, vocab // 4, HIDDEN)
    tensors["d2t"] = torch.arange(vocab // 4) * 3
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "vocab_size": vocab,
        "draft_vocab_size": vocab // 4,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    return write(path, config, tensors)


def save_medusa(path):
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for index in range(3):
        tensors[f"blocks.{index}.layers.0.weight"] = noise(generator, HIDDEN, HIDDEN)
        tensors[f"lm_heads.{index}.weight"] = noise(generator, VOCAB, HIDDEN)
    return write(path, {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}, tensors)


def write(path, config, tensors):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    return path


def save_with_mtp(path):
    save_checkpoint(path, **GLM)
    table = Parameters(torch.float32, torch.device("meta"))
    build_mtp(read_config(path), table)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(path / "model.safetensors")
    for name, parameter in table.table.items():
        ones = parameter.fill == "ones"
        shape = parameter.shape
        tensors[name] = torch.ones(shape) if ones else noise(generator, *shape)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def failures_are_seen(monkeypatch):
    guarded = DraftPlanner._guarded

    def seen(self):
        assert not self.broken, self.broken
        return guarded(self)

    monkeypatch.setattr(DraftPlanner, "_guarded", seen)


KINDS = ("eagle3", "medusa", "model", "mtp")
SIZES = {"kv_tokens": 16384, "max_rows": 16, "transports": ("grpc",), "page_size": 64, "token_budget": 512}


def paths(kind, folder):
    """The model, and what drafts for it."""
    if kind == "mtp":
        return save_with_mtp(folder / "model"), "mtp"
    model = save_checkpoint(folder / "model", num_hidden_layers=4)
    if kind == "eagle3":
        return model, str(save_eagle3(folder / "head"))
    if kind == "medusa":
        return model, str(save_medusa(folder / "head"))
    return model, str(save_checkpoint(folder / "small", num_hidden_layers=1))


def outputs(config, prompts, params, *, overlap, most=4):
    engine = build_engine(config, new_incarnation())
    try:
        drafter = make_drafter(config, engine.drafter, engine.cache)
        drafted = [0, 0]
        verified = DraftPlanner.verified

        def counted(self, sequence, kind, count, right):
            drafted[0] += count
            drafted[1] += right
            verified(self, sequence, kind, count, right)

        DraftPlanner.verified = counted
        try:
            options = {"overlap": overlap, "drafter": drafter, "draft_tokens": most if drafter else 0}
            found = generate(engine.runner, engine.cache, prompts, params, **options)
        finally:
            DraftPlanner.verified = verified
        graphs = isinstance(drafter, HeadDrafter) and drafter._graphs is not None
        return found, drafted, graphs
    finally:
        engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_without(tmp_path, monkeypatch, kind, graphs, overlap):
    """float32, where rows of one token and of several compute alike but for rounding; all parameters."""
    model, draft = paths(kind, tmp_path)
    if not graphs:
        monkeypatch.setattr(draft_model, "unsuited", lambda *_: "not here")
    params, prompts = parameters(), prompts_of(*range(3, 60, 6))
    common = {"model": str(model), "device": "cuda", "dtype": "float32", **SIZES}
    expected, _, _ = outputs(DecodeConfig(**common, draft="off"), prompts, params, overlap=overlap)
    found, drafted, has_graphs = outputs(
        DecodeConfig(**common, draft=draft, draft_tokens=4), prompts, params, overlap=overlap
    )
    assert found == expected
    assert drafted[0] > 100, drafted
    assert has_graphs == (graphs and kind in ("eagle3", "mtp"))


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16(tmp_path, kind):
    """Many rows, that end and begin, in the target's graphs: most texts are the same."""
    model, draft = paths(kind, tmp_path)
    prompts = prompts_of(*range(3, 300, 13))
    params = [
        SamplingParams(temperature=(0.0, 0.7)[i % 2], seed=i, max_tokens=40) for i in range(len(prompts))
    ]
    common = {"model": str(model), "device": "cuda", "dtype": "bfloat16", **SIZES}
    expected, _, _ = outputs(DecodeConfig(**common, draft="off"), prompts, params, overlap=True)
    found, drafted, _ = outputs(
        DecodeConfig(**common, draft=draft, draft_tokens=5), prompts, params, overlap=True, most=5
    )
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    assert same >= len(expected) // 2 and drafted[0] > 500, (same, drafted)


def test_a_model_is_always_right_of_itself(tmp_path):
    """Its tokens are drawn with the noise of the large one's."""
    model = save_checkpoint(tmp_path / "model")
    prompts = prompts_of(5, 40, 77)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40) for i in range(3)]
    common = {"model": str(model), "device": "cuda", "dtype": "float32", **SIZES}
    config = DecodeConfig(**common, draft=str(model), draft_tokens=4)
    _, (drafted, right), _ = outputs(config, prompts, params, overlap=False)
    assert right > 0.95 * drafted > 50


def test_graphs_draft_what_single_passes_do(tmp_path, monkeypatch):
    """An EAGLE-3 head in float32: acceptance is the same to a few tokens."""
    model, draft = paths("eagle3", tmp_path)
    prompts = prompts_of(5, 40, 77, 12, 33)
    params = [SamplingParams(temperature=0.0, max_tokens=60)] * 5
    config = DecodeConfig(
        model=str(model), device="cuda", dtype="float32", draft=draft, draft_tokens=4, **SIZES
    )
    drafts, counts = {}, Counter()
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setattr(draft_model, "unsuited", lambda *_: "not here")
        own = drafts[graphs] = {}
        draft_of = HeadDrafter.draft

        def kept(self, sequence, most, own=own, draft_of=draft_of):
            found = list(draft_of(self, sequence, most))
            named = [-1 - draft for draft in found if draft < 0]
            if named:
                assert len(named) == len(found)
                counts["named"] += len(named)
            known = self.guesses[named].tolist() if named else found
            own[sequence.request.key, len(sequence.tokens)] = known
            return found

        with monkeypatch.context() as patched:
            patched.setattr(HeadDrafter, "draft", kept)
            outputs(config, prompts, params, overlap=False)
    keys = drafts[True].keys() & drafts[False].keys()
    pairs = [(a, b) for key in keys for a, b in zip(drafts[True][key], drafts[False][key], strict=False)]
    assert len(pairs) > 200 and sum(a == b for a, b in pairs) > 0.97 * len(pairs)
    assert counts["named"] > 200, "the host waited for all drafts"
