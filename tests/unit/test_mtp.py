"""Layers of multi-token prediction: what they compute is what transformers' layers compute; texts are those
without them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from mtp_layers import VARIANTS, save_with_mtp
from random_checkpoints import VOCAB

from attention_rows import whole_sequence
from baton.attention.registry import resolve
from baton.config import DecodeConfig
from baton.engine.sampling_params import SamplingParams
from baton.kvcache.kv_pool import KvLayout, KvPool
from baton.models.loader import load_model
from baton.models.mtp import load_mtp
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError
from baton.worker.decode.drafters import make_drafter
from baton.worker.engine import build_engine
from rig import generate, parameters, prompts_of, save_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @cache
    def get(variant):
        path = tmp_path_factory.mktemp(variant)
        return path, save_with_mtp(variant, path)

    return get


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


def prompts(*lengths):
    return [[token % VOCAB for token in prompt] for prompt in prompts_of(*lengths)]


def test_logits_are_those_of_plain_torch(saved, variant):
    path, plain = saved(variant)
    head = load_mtp(path, load_model(path, torch.float32, "cpu"))
    (tokens,) = prompts(40)
    features = plain.features(tokens)[:-1]
    spec = head.caches[0]
    layout = KvLayout(1, spec.heads, spec.head_dim, 1024, torch.float32, spec.parts)
    used = frozenset[str]().union(*(options.features for options in head.attention_options))
    backend = resolve("auto", torch.device("cpu"), features=used)[0](
        KvPool(layout, 1), head.heads, head.attention_options
    )
    with torch.inference_mode():
        batch = whole_sequence(tokens[1:], backend, head.attention_options)
        states = head.forward(batch.tokens, head.enter(features), batch)
        logits = head.logits(states)
    expected = plain.forward(tokens[1:], features)
    assert torch.allclose(states, expected, atol=1e-4)
    assert torch.allclose(logits, plain.logits(expected), atol=1e-4)


def engine(path, draft):
    sizes = {"kv_tokens": 8192, "max_rows": 16, "transports": ("grpc",), "page_size": 16}
    config = DecodeConfig(model=str(path), draft=draft, device="cpu", **sizes)
    return build_engine(config, new_incarnation())


def test_chains_and_texts_through_an_engine(saved, variant):
    """Guesses are those of plain torch, in prompts of several chunks and behind what was accepted; texts with
    all sampling parameters are those without."""
    path, plain = saved(variant)
    params, some = parameters(), prompts(*range(3, 33, 3))
    greedy = [SamplingParams(temperature=0.0, max_tokens=8)] * 2
    without = engine(path, "off")
    try:
        expected = [
            generate(without.runner, without.cache, *asked, overlap=False)
            for asked in ((some, params), (prompts(5, 37), greedy))
        ]
    finally:
        without.close()
    own = engine(path, "mtp")
    try:
        drafter, checked, counted = make_drafter(own.config, own.drafter, own.cache), [], []
        options = {"overlap": False, "drafter": drafter, "draft_tokens": 3}
        assert drafter.name == "mtp"
        draft = drafter.draft

        def compared(sequence, most):
            found = list(draft(sequence, most))
            checked.append(found == plain.chain(sequence.tokens, most))
            return found

        drafter.draft = lambda sequence, most: counted.append(found := draft(sequence, most)) or found
        assert generate(own.runner, own.cache, some, params, **options) == expected[0]
        assert sum(map(len, counted)) > 100
        drafter.draft = compared
        assert generate(own.runner, own.cache, prompts(5, 37), greedy, budget=24, **options) == expected[1]
        assert len(checked) >= 10 and all(checked)
    finally:
        own.close()


def test_models_without_such_a_layer_are_refused(saved, tmp_path):
    plain = save_checkpoint(tmp_path / "plain")
    with pytest.raises(BatonError, match=r"no layers of multi-token prediction \(mtp\) are read of Qwen3For"):
        engine(plain, "mtp")
    bare, _ = saved("deepseek-v3")
    copy = tmp_path / "bare"
    copy.mkdir()
    from safetensors.torch import load_file, save_file

    tensors = load_file(bare / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.startswith("model.layers.2.")}
    save_file(kept, copy / "model.safetensors")
    (copy / "config.json").write_text((bare / "config.json").read_text())
    with pytest.raises(BatonError, match="has no layer of multi-token prediction"):
        engine(copy, "mtp")
