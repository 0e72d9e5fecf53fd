"""Quantized models through all processes, against transformers with the dequantized weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from asking import ask, greedy
from checkpoints import VOCABULARY, make_model, save
from deployment import Deployment
from process import Process
from transformers import PreTrainedModel

from baton.layers.quantization.weight_method import quantize
from quantizers import Scheme, awq, compressed, fp8_blocks, write

OUTPUT = 64
LENGTHS = [1, 17, 40, 64, 160]
QUANTIZED: dict[str, tuple[Scheme | None, float]] = {
    "fp8-blocks": (fp8_blocks((32, 32)), 1e-4),
    "int8-kept": (compressed("int-quantized", num_bits=8, strategy="channel"), 1e-4),
    "4-bits-kept": (awq(), 0.1),
    "int8-while-loading": (None, 1e-4),
}
"""Scheme of the checkpoint, and by how much the logit of a token may be below the largest."""


@dataclass
class Routes:
    model: PreTrainedModel
    tie: float
    prefill: Process
    split: Process
    aggregated: Process
    other: Process | None
    """Gateway of a decode node with other weights than its prefill node."""


@pytest.fixture(scope="module", params=QUANTIZED)
def routes(request, tmp_path_factory, deployments) -> Iterator[Routes]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model("qwen3")
    path, (scheme, tie), flags = save(model, folder / "model"), QUANTIZED[request.param], ()
    if scheme is None:
        flags = ("--quantization", "int8")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".layers." in name and parameter.dim() == 2:
                    parameter.copy_(quantize(parameter, 8, parameter.shape[1]).dequantize())
    else:
        write(path, model, scheme)
    deployment = Deployment(folder, path)
    prefill = deployment.add_worker("prefill", "--kv-tokens", "4096", *flags)
    decode = deployment.add_worker("decode", "--kv-tokens", "4096", *flags)
    split, aggregated = deployment.add_gateway([decode], [prefill]), deployment.add_gateway([decode])
    other = None
    if flags:
        plain = deployment.add_worker("decode", "--kv-tokens", "4096")
        other = deployment.add_gateway([plain], [prefill])
    with deployment:
        deployments.append(deployment)
        yield Routes(model, tie, prefill, split, aggregated, other)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("route", ["split", "aggregated"])
async def test_greedy_tokens_are_those_of_the_dequantized_weights(routes, route):
    gateway = routes.split if route == "split" else routes.aggregated
    requests = [greedy(prompt, OUTPUT, namespace=route) for prompt in prompts()]
    for prompt, answer in zip(prompts(), await ask(gateway.address, requests), strict=True):
        handed_off = route == "split" and len(prompt) > 32
        assert answer.stats.prefill_address == (routes.prefill.address if handed_off else "")
        assert len(answer.token_ids) == OUTPUT
        with torch.inference_mode():
            logits = routes.model(torch.tensor([[*prompt, *answer.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
        below = logits.amax(1) - logits[torch.arange(OUTPUT), torch.tensor(answer.token_ids)]
        assert float(below.max()) <= routes.tie


@pytest.mark.parametrize("routes", ["int8-while-loading"], indirect=True, scope="module")
async def test_a_peer_with_other_weights_is_refused(routes):
    assert routes.other is not None
    (answer,) = await ask(routes.other.address, [greedy(prompts()[-1], 4)])
    assert answer.stats.prefill_address == "", "pages of quantized weights were used"
