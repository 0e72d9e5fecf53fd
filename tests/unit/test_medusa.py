"""Medusa heads: what they compute is what plain torch computes; texts are those without them."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from baton.config import DecodeConfig
from baton.engine.draft.medusa import MedusaDrafter
from baton.engine.sampling_params import SamplingParams
from baton.layers.batch import FINAL
from baton.models.loader import load_model
from baton.models.medusa import load_medusa
from baton.rpc.address import new_incarnation
from baton.worker.decode.drafters import make_drafter
from baton.worker.engine import build_engine
from rig import VOCAB, generate, make, parameters, prompts_of, save_checkpoint

HIDDEN, HEADS = 256, 3
VLLM = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 1}
LISTED = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Its next token follows from the last one alone."""
    path = save_checkpoint(tmp_path_factory.mktemp("target"))
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name:
            tensor.zero_()
    save_file(weights, path / "model.safetensors")
    return path


def save_heads(path, listed, right=0.0, outputs=()):
    """Random heads. `right`: how much they know of what follows each final state of `outputs`."""
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for head in range(HEADS):
        layer = torch.randn(HIDDEN, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
        bias = torch.randn(HIDDEN, generator=generator)
        output = torch.randn(VOCAB, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
        if outputs:
            layer, bias = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN)
            states, follow = outputs
            wanted = F.one_hot(follow[head], VOCAB).float() * right
            output = (torch.linalg.pinv(states[: len(wanted)]) @ wanted).T.contiguous()
        if listed:
            tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"] = layer, bias
            tensors[f"{head}.1.weight"] = output
        else:
            tensors[f"blocks.{head}.layers.0.weight"], tensors[f"lm_heads.{head}.weight"] = layer, output
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LISTED if listed else VLLM))
    save_file(tensors, path / "model.safetensors")
    return tensors


def run(checkpoint, prompts, params, drafter=None, **options):
    runner, cache = make(checkpoint, "cpu", torch.float32)
    runner._tap = drafter.tap if drafter is not None else ()
    rows = []
    launch = runner.launch
    runner.launch = lambda plan: (rows.extend(r for r in plan.rows if r.tokens is None), launch(plan))[1]
    options = {"overlap": False, "draft_tokens": HEADS, **options}
    return generate(runner, cache, prompts, params, drafter=drafter, **options), rows


def drafter_of(path, checkpoint):
    heads = load_medusa(path, load_model(checkpoint, torch.float32, "cpu"))
    return MedusaDrafter(heads, 16, VOCAB, torch.device("cpu"))


@pytest.mark.parametrize("listed", [False, True])
def test_random_heads(checkpoint, tmp_path, listed):
    tensors = save_heads(tmp_path / "heads", listed)
    drafter = drafter_of(tmp_path / "heads", checkpoint)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for head in range(HEADS):
        name = f"{head}.0.linear" if listed else f"blocks.{head}.layers.0"
        bias = tensors.get(f"{name}.bias", torch.zeros(HIDDEN))
        inner = hidden + F.silu(hidden @ tensors[f"{name}.weight"].T + bias)
        expected = inner @ tensors[f"{head}.1.weight" if listed else f"lm_heads.{head}.weight"].T
        with torch.inference_mode():
            assert torch.allclose(drafter._heads.logits(head, hidden), expected, atol=1e-4)
    prompts, params = prompts_of(*range(3, 33, 3)), parameters()
    plain, _ = run(checkpoint, prompts, params)
    for overlap in (False, True):
        outputs, rows = run(checkpoint, prompts, params, drafter, overlap=overlap)
        assert outputs == plain
        assert sum(len(row.drafts) for row in rows) > 100


def test_heads_that_know_are_right(checkpoint, tmp_path):
    """They map each final state of an earlier run to the tokens that came behind it."""
    prompts, params = prompts_of(4, 7), [SamplingParams(temperature=0.0, max_tokens=30)] * 2
    plain, _ = run(checkpoint, prompts, params)
    runner, cache = make(checkpoint, "cpu", torch.float32)
    states, follow = [], [[] for _ in range(HEADS)]
    runner._tap = (FINAL,)
    for prompt, output in zip(prompts, plain, strict=True):
        text, found = prompt + output, []
        read = runner.read

        def kept(launched_step, read=read, found=found):
            result = read(launched_step)
            found.append(result.rows[0].hidden)
            return result

        runner.read = kept
        assert generate(runner, cache, [prompt], params[:1], overlap=False) == [output]
        runner.read = read
        hidden = torch.cat(found)
        for at in range(len(prompt) - 1, len(text) - 2 - HEADS):
            states.append(hidden[at])
            for head in range(HEADS):
                follow[head].append(text[at + 2 + head])
    known = torch.stack(states).clone(), [torch.tensor(tokens) for tokens in follow]
    save_heads(tmp_path / "heads", False, 10.0, known)
    outputs, rows = run(checkpoint, prompts, params, drafter_of(tmp_path / "heads", checkpoint))
    assert outputs == plain
    assert sum(map(len, outputs)) - len(outputs) > 2 * len(rows)


def test_a_worker_with_medusa_heads(checkpoint, tmp_path):
    save_heads(tmp_path / "heads", True)
    sizes = {"kv_tokens": 2048, "max_rows": 4, "transports": ("grpc",)}
    config = DecodeConfig(model=str(checkpoint), draft=str(tmp_path / "heads"), device="cpu", **sizes)
    engine = build_engine(config, new_incarnation())
    try:
        drafter = make_drafter(config, engine.drafter, engine.cache)
        assert isinstance(drafter, MedusaDrafter)
        prompts, params = prompts_of(20), [SamplingParams(temperature=0.0, max_tokens=12)]
        options = {"overlap": False, "drafter": drafter, "draft_tokens": 3}
        outputs = generate(engine.runner, engine.cache, prompts, params, **options)
        assert outputs == run(checkpoint, prompts, params)[0]
    finally:
        engine.close()
