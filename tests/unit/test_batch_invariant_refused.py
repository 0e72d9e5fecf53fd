"""Where the batch-invariant mode cannot be had, a worker says so before it loads anything."""

from __future__ import annotations

import pytest

from baton.config import WorkerConfig
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError
from baton.worker.engine import build_engine


def test_it_needs_a_gpu():
    config = WorkerConfig(model="no-such-model", device="cpu", batch_invariant=True)
    with pytest.raises(BatonError, match="--batch-invariant needs an NVIDIA GPU, not cpu"):
        build_engine(config, new_incarnation())


def test_attention_of_another_kind_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("baton.worker.checks.sized", lambda config, device: config)
    config = WorkerConfig(
        model="no-such-model",
        device="cuda",
        batch_invariant=True,
        decode_attention="triton",
        max_rows=8,
        token_budget=64,
    )
    with pytest.raises(BatonError, match="--batch-invariant excludes attention 'triton'"):
        build_engine(config, new_incarnation())
