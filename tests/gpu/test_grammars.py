"""Constrained rows with kernels: under overlap the mask waits for the token before it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from baton.engine.cuda_sampler import CudaSampler
from baton.engine.plan import SlotInit
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import SamplingParams
from baton.grammar.base import Matcher
from rig import CUDA, GREEDY, VOCAB, generate, make, prompts_of, save_checkpoint


class EveryThird(Matcher):
    """After n tokens those are allowed whose id is n modulo 3."""

    def __init__(self):
        self.count = 0

    def matcher(self):
        return EveryThird()

    def accept(self, tokens):
        for token in tokens:
            assert token % 3 == self.count % 3, "sampled what was forbidden"
            self.count += 1

    def fill(self, words):
        bits = np.zeros(len(words) * 32, np.bool_)
        bits[self.count % 3 : VOCAB : 3] = True
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model"))


LENGTHS = (5, 40, 33, 120, 1, 64)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["graphs:triton/triton", "eager:triton/triton", "plain"])
def test_constrained_rows_equal_those_of_the_cpu(checkpoint, kind, overlap):
    """Beside free ones, greedy and with a temperature, in prompts' last chunks and decode steps."""
    prompts = prompts_of(*LENGTHS)
    grammars = [EveryThird() if i % 3 != 1 else None for i in range(len(prompts))]
    params = [
        dataclasses.replace(GREEDY, max_tokens=12 + i, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    want = generate(
        *make(checkpoint, "cpu", torch.float32), prompts, params, budget=64, grammars=grammars, overlap=False
    )
    runner, cache = make(checkpoint, kind, torch.float32)
    got = generate(runner, cache, prompts, params, budget=64, grammars=grammars, overlap=overlap)
    assert got == want
    for tokens, grammar in zip(got, grammars, strict=True):
        assert (grammar is not None) == all(token % 3 == i % 3 for i, token in enumerate(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_samples_equal_those_of_the_cpu(dtype):
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=1.0, top_k=20),
        SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, logprobs=3),
        SamplingParams(temperature=0.0, logit_bias={5: 3.0, 9: -50.0}),
        SamplingParams(temperature=0.9),
    ]
    samplers = Sampler(len(params), VOCAB, torch.device("cpu")), CudaSampler(len(params), VOCAB, CUDA)
    for slot, own in enumerate(params):
        grammar = EveryThird() if slot != 5 else None
        for sampler in samplers:
            sampler.init(SlotInit(slot, own, 100 + slot, (1, 2, 3), (), grammar=grammar))
    slots, last = np.arange(len(params)), torch.zeros(len(params) + 1, dtype=torch.int32, device=CUDA)
    for position in range(6):
        torch.manual_seed(position)
        logits = (3 * torch.randn(len(params), VOCAB)).to(dtype)
        of_cpu = samplers[0].sample(
            logits.float().clone(),
            slots,
            np.full(len(params), position),
            samplers[0].begin_masks(slots.tolist()),
        )
        rows = samplers[1].grammars.constrained(slots.tolist())
        masks = samplers[1].masks(slots.tolist(), rows)
        found = samplers[1].sample(logits.to(CUDA), slots, np.full(len(params), position), last, masks)
        masks.launched()
        tokens = found.tokens.tolist()
        masks.sampled(tokens[row] for row in masks.rows)
        assert tokens == of_cpu.tokens.tolist()
        assert all(token % 3 == position % 3 for token in tokens[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 151_936])
def test_a_mask_is_as_if_the_forbidden_logits_were_not_there(vocab, dtype):
    """By the kernel that knows temperatures and masks alone. It tells of logits that are no numbers, allowed
    or not."""
    from baton.layers.kernels.sampling import sample

    torch.manual_seed(vocab)
    rows, width = 6, -(-vocab // 32)
    logits = (2 * torch.randn(rows, vocab)).to(dtype)
    bits = np.random.default_rng(vocab).random((3, 32 * width)) < 0.02
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    masked = torch.tensor([0, -1, 1, -1, 2, -1], dtype=torch.int32)
    open_rows, before = logits.clone(), torch.from_numpy(~bits[:, :vocab])
    open_rows[::2] = open_rows[::2].masked_fill(before, -torch.inf)
    temperatures = torch.tensor([0.0, 0.0, 1.0, 0.7, 1.3, 2.0])
    there = [x.to(CUDA) for x in (temperatures, torch.arange(rows) * 12345, torch.arange(rows).int())]
    masks = (words.to(CUDA), masked.to(CUDA))

    def sampled(logits, masks):
        last, result = (torch.zeros(*shape, dtype=torch.int32, device=CUDA) for shape in ((rows,), (rows, 2)))
        sample(logits.to(CUDA), *there, last, result, masks=masks)
        assert torch.equal(last, result[:, 0])
        return result.cpu()

    assert torch.equal(sampled(logits, masks), sampled(open_rows, None))
    for row, mask, value in ((0, 0, torch.nan), (2, 1, torch.inf)):
        logits[row, int(before[mask].nonzero()[0])] = value
    finite = sampled(logits, masks)[:, 1].view(torch.float32).isfinite()
    assert finite.tolist() == [False, True, False, True, True, True]
