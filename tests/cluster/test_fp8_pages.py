"""The KV pool in FP8 through all processes, against transformers with keys and values rounded alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from asking import ask, greedy
from checkpoints import VOCABULARY, make_model, save
from deployment import Deployment
from process import Process
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

OUTPUT = 48
LENGTHS = [1, 17, 40, 64, 160]
TIE = 0.01
"""By how much the logit of a token may be below the largest: where float32 sums differ in their last bit, a
number may be rounded to its other neighbour."""
FLAGS = ("--kv-tokens", "4096", "--kv-dtype", "fp8_e4m3")
SCALES = {"qwen3": [[[0.6, 0.3], [0.11, 0.07]], [[1.0, 1.0], [0.9, 0.9]], [[1.0, 1.0], [1.0, 1.0]]]}
"""By family: of each layer, of keys and values, of each KV head."""


@dataclass
class Routes:
    model: PreTrainedModel
    prefill: Process
    gateways: dict[str, Process]


def rounded_attention(module, query, key, value, mask, **options):
    """transformers' own over what e4m3 keeps of keys and values, [rows, kv heads, tokens, head_dim]."""
    scales = getattr(module, "kv_scales", torch.ones(2, key.shape[1]))
    key, value = (
        (part / by[:, None, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float() * by[:, None, None]
        for part, by in zip((key, value), scales, strict=True)
    )
    return sdpa_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register("rounded", rounded_attention)
AttentionMaskInterface.register("rounded", sdpa_mask)


def add_scales(name: str, model: PreTrainedModel, path: Path) -> None:
    """To the checkpoint as published ones name them, and to the model's layers."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for index, (layer, scales) in enumerate(zip(model.model.layers, SCALES.get(name, []), strict=False)):
        keys, values = (torch.tensor(each) for each in scales)
        layer.self_attn.kv_scales = torch.stack((keys, values))
        prefix = f"model.layers.{index}.self_attn"
        if index == 0:
            tensors |= {f"{prefix}.k_scale": keys, f"{prefix}.v_scale": values}
        elif index == 1:
            tensors[f"{prefix}.v_proj.v_scale"] = values[0]
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def routes(request, tmp_path_factory, deployments) -> Iterator[Routes]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    path = save(model, folder / "model")
    add_scales(request.param, model, path)
    deployment = Deployment(folder, path)
    prefill = deployment.add_worker("prefill", *FLAGS)
    decode = deployment.add_worker("decode", *FLAGS)
    apart = deployment.add_worker("decode", *FLAGS, "--transports", "grpc")
    gateways = {
        "shm": deployment.add_gateway([decode], [prefill]),
        "grpc": deployment.add_gateway([apart], [prefill]),
        "aggregated": deployment.add_gateway([decode]),
    }
    if request.param == "qwen3":
        plain = deployment.add_worker("decode", "--kv-tokens", "4096")
        gateways["other"] = deployment.add_gateway([plain], [prefill])
    with deployment:
        deployments.append(deployment)
        yield Routes(model, prefill, gateways)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


def below(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """How far the logit of one of the tokens is below the largest, at most."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return float((logits.amax(1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).max())


@pytest.mark.parametrize("route", ["shm", "grpc", "aggregated"])
async def test_greedy_tokens_are_those_of_rounded_keys_and_values(routes, route):
    requests = [greedy(prompt, OUTPUT, namespace=route) for prompt in prompts()]
    answers = await ask(routes.gateways[route].address, requests)
    plainly = []
    for prompt, answer in zip(prompts(), answers, strict=True):
        handed_off = route != "aggregated" and len(prompt) > 32
        assert answer.stats.prefill_address == (routes.prefill.address if handed_off else "")
        assert len(answer.token_ids) == OUTPUT
        routes.model.set_attn_implementation("rounded")
        assert below(routes.model, prompt, answer.token_ids) <= TIE
        routes.model.set_attn_implementation("sdpa")
        plainly.append(below(routes.model, prompt, answer.token_ids))
    assert max(plainly) > 2 * TIE, "rounding decides nothing here"
    again = await ask(routes.gateways[route].address, requests)
    assert [each.token_ids for each in again] == [each.token_ids for each in answers]
    assert again[-1].usage.cached_tokens > 0


@pytest.mark.parametrize("routes", ["qwen3"], indirect=True, scope="module")
async def test_a_peer_with_another_kv_dtype_is_refused_and_says_why(routes):
    (answer,) = await ask(routes.gateways["other"].address, [greedy(prompts()[-1], 4)])
    assert answer.stats.prefill_address == "", "pages in FP8 were used as float32"
