"""Where the batch-invariant mode cannot be had, a worker says so before it loads anything."""

from __future__ import annotations

import pytest

from baton.attention.registry import NoBackend
from baton.config import WorkerConfig
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError
from baton.worker.checks import checked
from baton.worker.engine import build_engine


def test_it_needs_a_gpu():
    config = WorkerConfig(model="no-such-model", device="cpu", batch_invariant=True)
    with pytest.raises(BatonError, match="--batch-invariant needs an NVIDIA GPU, not cpu"):
        build_engine(config, new_incarnation())


@pytest.fixture
def gpu(monkeypatch):
    """As on a machine with one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("baton.worker.checks.sized", lambda config, device: config)
    return {"device": "cuda", "batch_invariant": True, "max_rows": 8, "token_budget": 64}


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        ("auto", "triton", "--batch-invariant excludes attention 'triton'"),
        ("fa3-fixed", "triton-fixed", "the same attention backend for prompts and for decode rows"),
    ],
)
def test_attention_of_another_kind_is_refused(gpu, prefill, decode, text):
    config = WorkerConfig(model="no-such-model", prefill_attention=prefill, decode_attention=decode, **gpu)
    with pytest.raises(BatonError, match=text):
        build_engine(config, new_incarnation())


@pytest.mark.parametrize(
    ("prefill", "decode", "both"),
    [("auto", "auto", "auto"), ("auto", "triton-fixed", "triton-fixed"), ("fa3-fixed", "auto", "fa3-fixed")],
)
def test_prompts_and_decode_rows_get_one_backend(gpu, monkeypatch, prefill, decode, both):
    monkeypatch.setattr("baton.worker.checks.check_model", lambda *_: None)
    config, _ = checked(WorkerConfig(prefill_attention=prefill, decode_attention=decode, **gpu))
    assert (config.prefill_attention, config.decode_attention) == (both, both)


def test_what_cannot_be_had_is_said_before_the_model_is_loaded(gpu, monkeypatch):
    def refuse(name, device, dtype, head_dim, features, invariant):
        raise NoBackend(f"{name} {invariant}")

    monkeypatch.setattr("baton.worker.model.resolve_attention", refuse)
    with pytest.raises(NoBackend, match="auto True"):
        checked(WorkerConfig(model="demo", **gpu))
