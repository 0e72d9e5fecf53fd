"""Weights in any layout compute the same, and the layout that is faster here is the one taken."""

import time

import pytest
import torch
import torch.nn.functional as F

from baton.layers import linear as layouts
from baton.layers.linear import Blocked, Linear, Transposed, blocked_available, fastest_layout


@pytest.mark.parametrize("layout", [Transposed, Blocked])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layouts_compute_the_same(layout, dtype, tolerance, rows, with_bias):
    if layout is Blocked and not blocked_available(dtype):
        pytest.skip(f"oneDNN has no layout of its own for {dtype} on this processor")
    torch.manual_seed(rows)
    weight = torch.randn(48, 32).mul_(0.2).to(dtype)
    bias = torch.randn(48).to(dtype) if with_bias else None
    x, residual = torch.randn(rows, 32).to(dtype), torch.randn(rows, 48).to(dtype)
    expected = F.linear(x, weight, bias)
    linear = Linear(weight.clone(), bias)
    linear.pack(layout)
    torch.testing.assert_close(linear(x), expected, rtol=tolerance, atol=tolerance)
    total = linear.add_to(residual.clone(), x)
    torch.testing.assert_close(total, residual + expected, rtol=tolerance, atol=tolerance)
    assert linear.weight is None


@pytest.mark.parametrize("slow", ["Transposed", "Blocked"])
def test_the_faster_layout_is_taken(monkeypatch, slow):
    class Slow(getattr(layouts, slow)):
        __slots__ = ()

        def apply(self, x, bias):
            ending = time.thread_time() + 0.002
            while time.thread_time() < ending:
                pass
            return super().apply(x, bias)

    monkeypatch.setattr(layouts, slow, Slow)
    threads = torch.get_num_threads()
    chosen = fastest_layout(torch.randn(64, 64))
    assert chosen is getattr(layouts, {"Transposed": "Blocked", "Blocked": "Transposed"}[slow])
    assert torch.get_num_threads() == threads


def test_a_processor_without_the_blocked_layout_gets_the_other(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert fastest_layout(torch.randn(64, 64).bfloat16()) is Transposed


def test_a_clock_that_ticks_too_rarely_decides_nothing(monkeypatch):
    monkeypatch.setattr(layouts.time, "thread_time", lambda: 1.0)
    monkeypatch.setattr(layouts, "blocked_available", lambda dtype: True)
    assert fastest_layout(torch.randn(64, 64)) is Transposed
