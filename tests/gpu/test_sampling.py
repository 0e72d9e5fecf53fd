"""Sampling on a GPU is the same function as on the CPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from rig import CUDA

from baton.engine.plan import SlotInit
from baton.engine.sampler import Sampler
from baton.engine.sampling import SamplingParams

CPU = torch.device("cpu")


def random_params(rng, vocab):
    def maybe(value, default):
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=maybe(0.0, rng.choice([0.3, 0.7, 1.0, 2.5])),
        top_k=maybe(rng.choice([1, 2, 17, 500, vocab + 5]), 0),
        top_p=maybe(rng.choice([0.01, 0.5, 0.9, 0.99]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.7, 1.5]), 1.0),
        presence_penalty=maybe(rng.choice([-1.0, 0.8]), 0.0),
        frequency_penalty=maybe(rng.choice([-0.5, 0.6]), 0.0),
        logit_bias=maybe({3: 4.0, 9: -100.0, 70: 2.5}, {}),
        min_tokens=maybe(4, 0),
        stop_token_ids=frozenset(maybe({5, 11, 80}, set())),
        seed=rng.getrandbits(64),
        logprobs=maybe(rng.choice([0, 1, 5]), None),
    )


@pytest.mark.parametrize("vocab", [3000, 151_936])
@pytest.mark.parametrize("case", range(4))
def test_any_mix_of_parameters(vocab, case):
    rng = random.Random(case)
    torch.manual_seed(case)
    slots = 24
    samplers = [Sampler(slots, vocab, device) for device in (CPU, CUDA)]
    for slot in range(slots):
        params = random_params(rng, vocab)
        tokens = [tuple(rng.randrange(90) for _ in range(n)) for n in (20, rng.randrange(5))]
        for sampler in samplers:
            sampler.init(SlotInit(slot, params, params.seed, *tokens))
    for step in range(3):
        chosen = np.array(rng.sample(range(slots), rng.randrange(1, slots + 1)))
        positions = np.full(len(chosen), 30 + step)
        logits = torch.randn(len(chosen), vocab) * 3
        cpu, gpu = (
            sampler.sample(logits.to(device), chosen, positions)
            for sampler, device in zip(samplers, (CPU, CUDA), strict=True)
        )
        assert gpu.tokens.tolist() == cpu.tokens.tolist()
        assert torch.equal(gpu.peaks.cpu(), cpu.peaks)
        assert gpu.logprob_rows == cpu.logprob_rows
        if cpu.logprobs is not None:
            for a, b in zip(cpu.logprobs.read(cpu.wanted), gpu.logprobs.read(gpu.wanted), strict=True):
                assert a.token == b.token and [t for t, _ in a.top] == [t for t, _ in b.top]
                assert b.logprob == pytest.approx(a.logprob, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 4096, 151_936])
def test_the_kernel_for_greedy_and_temperature(vocab, dtype):
    from baton.layers.kernels.sampling import sample

    torch.manual_seed(vocab)
    rows = 96
    logits = (torch.randn(rows, vocab) * 2).to(dtype)
    sampler = Sampler(rows, vocab, CPU)
    for slot in range(rows):
        temperature = (0.0, 0.6, 1.0, 3.0)[slot % 4]
        sampler.init(SlotInit(slot, SamplingParams(temperature=temperature), slot * 2**57 + 11, (), ()))
    slots, positions = np.random.default_rng(0).permutation(rows), np.arange(rows) * 37
    want = sampler.sample(logits.float(), slots, positions)
    temperatures, keys = sampler.simple(slots, positions)
    last = torch.full((rows,), -1, dtype=torch.int32, device=CUDA)
    result = torch.full((rows, 2), -1, dtype=torch.int32, device=CUDA)
    sample(
        logits.to(CUDA),
        torch.from_numpy(temperatures).to(CUDA),
        torch.from_numpy(keys).to(CUDA),
        torch.from_numpy(slots.astype(np.int32)).to(CUDA),
        last,
        result,
    )
    assert result[:, 0].tolist() == want.tokens.tolist()
    assert last[torch.from_numpy(slots).to(CUDA)].tolist() == want.tokens.tolist()
    assert torch.equal(result[:, 1].cpu().view(torch.float32), want.peaks)


def test_the_kernel_tells_of_logits_that_are_not_numbers():
    from baton.layers.kernels.sampling import sample

    logits = torch.randn(3, 9000, device=CUDA)
    logits[1, 8000] = torch.nan
    result = torch.zeros(3, 2, dtype=torch.int32, device=CUDA)
    zeros = torch.zeros(3, device=CUDA)
    sample(logits, zeros, zeros.long(), zeros.int(), torch.zeros(1, dtype=torch.int32, device=CUDA), result)
    assert result[:, 1].cpu().view(torch.float32).isfinite().tolist() == [True, False, True]
