"""Sampling on a GPU is the same function as on the CPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.cuda_sampler import CudaSampler
from baton.engine.plan import SlotInit
from baton.engine.sampler import Sampler
from baton.engine.sampler_ops import penalize, thresholds
from baton.engine.sampling_params import SamplingParams
from rig import CUDA

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


SLOTS = 24


def filled(rng, vocab, params=None):
    """A sampler on the CPU and one on the GPU, whose slots hold the same."""
    samplers = Sampler(SLOTS, vocab, CPU), CudaSampler(SLOTS, vocab, CUDA)
    for slot in range(SLOTS):
        own = params or random_params(rng, vocab)
        tokens = [tuple(rng.randrange(90) for _ in range(n)) for n in (20, rng.randrange(5))]
        for sampler in samplers:
            sampler.init(SlotInit(slot, own, own.seed, *tokens))
    return samplers


def on_gpu(sampler, logits, slots, positions):
    """Its samples; what it leaves as last tokens is checked."""
    last = torch.full((SLOTS + 1,), -1, dtype=torch.int32, device=CUDA)
    samples = sampler.sample(logits.to(CUDA), slots, positions, last)
    assert torch.equal(last[torch.from_numpy(slots).to(CUDA)], samples.tokens)
    assert (last >= 0).sum().item() == len(slots)
    return samples


def same_tops(a, b):
    """Values, and tokens but for those among equals at the end: nobody says which of these come."""
    values = [value for _, value in a]
    assert values == pytest.approx([value for _, value in b], abs=1e-4)
    least = min(values, default=0.0) + 1e-3
    return {t for t, value in a if value > least} == {t for t, value in b if value > least}


@pytest.mark.parametrize("scale", [3.0, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3000, 151_936])
@pytest.mark.parametrize("case", range(4))
def test_any_mix_of_parameters(vocab, case, dtype, scale):
    """Tokens, counts that penalties go by, and log-probabilities."""
    rng = random.Random(case)
    torch.manual_seed(case)
    of_cpu, of_gpu = filled(rng, vocab)
    for step in range(3):
        chosen = np.array(rng.sample(range(SLOTS), rng.randrange(1, SLOTS + 1)))
        positions = np.full(len(chosen), 30 + step)
        logits = (torch.randn(len(chosen), vocab) * scale).to(dtype)
        cpu = of_cpu.sample(logits.float().clone(), chosen, positions)
        gpu = on_gpu(of_gpu, logits, chosen, positions)
        assert gpu.tokens.tolist() == cpu.tokens.tolist()
        assert torch.equal(gpu.peaks.cpu(), cpu.peaks)
        counts = of_cpu._states.counts, of_gpu._states.counts
        assert (counts[0] is None) == (counts[1] is None)
        assert counts[0] is None or torch.equal(counts[0], counts[1].cpu())
        assert gpu.logprob_rows == cpu.logprob_rows
        if cpu.logprobs is not None:
            for a, b in zip(
                cpu.logprobs.read(cpu.logprob_counts), gpu.logprobs.read(gpu.logprob_counts), strict=True
            ):
                assert a.token == b.token and same_tops(a.top, b.top)
                assert b.logprob == pytest.approx(a.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=50, top_p=0.9, seed=1),
        SamplingParams(top_p=0.9, seed=2),
        SamplingParams(top_p=0.999, temperature=4.0, seed=3),
        SamplingParams(top_k=20_000, top_p=0.5, seed=4),
        SamplingParams(min_p=0.02, repetition_penalty=1.3, seed=5),
        SamplingParams(temperature=1e-30, top_k=3, seed=6),
    ],
)
@pytest.mark.parametrize("shape", ["normal", "rounded", "equal", "peaked", "forbidden"])
def test_restrictions_of_logits_of_any_shape(params, shape):
    """Many ties, no ties, one certain token, most of them impossible: what is kept is never wrong by more
    than the one token at a limit."""
    vocab, rng = 50_000, random.Random(0)
    torch.manual_seed(0)
    logits = torch.randn(SLOTS, vocab)
    if shape == "rounded":
        logits = (logits * 4).round() / 4
    elif shape == "equal":
        logits.zero_()
    elif shape == "peaked":
        logits[:, 7] = 60
    elif shape == "forbidden":
        logits[:, 11:] = -torch.inf
    of_cpu, of_gpu = filled(rng, vocab, params)
    slots = np.arange(SLOTS)
    for step in range(4):
        positions = slots + 100 * step
        cpu = of_cpu.sample(logits.clone(), slots, positions)
        assert on_gpu(of_gpu, logits, slots, positions).tokens.tolist() == cpu.tokens.tolist()


@pytest.mark.parametrize("vocab", [3000, 50_000])
@pytest.mark.parametrize("rounded", [False, True])
def test_limits_keep_what_thresholds_keep(vocab, rounded):
    """Token for token, but for one whose cumulative mass is top-p itself as far as float32 can tell."""
    from baton.layers.kernels.top_k_top_p import restrict

    torch.manual_seed(vocab)
    cases = [(k, p) for k in (0, 1, 50, 2500, vocab) for p in (0.01, 0.5, 0.9, 0.999, 1.0)]
    rows = len(cases)
    logits = torch.randn(rows, vocab) * torch.linspace(0.1, 4, rows)[:, None]
    if rounded:
        logits = logits.bfloat16().float()
    temperatures = torch.tensor([0.5, 1.0, 2.0]).repeat(rows)[:rows]
    peaks = logits.amax(-1, keepdim=True)
    top_k, top_p = torch.tensor([k for k, _ in cases]), torch.tensor([p for _, p in cases])
    scaled = (logits - peaks) / temperatures[:, None]
    want = scaled >= thresholds(scaled, top_k, top_p, 0)[:, None]
    limits = torch.full((rows,), torch.inf, device=CUDA)
    nowhere = torch.full((rows,), -1, dtype=torch.int32, device=CUDA)
    there = [x.to(CUDA) for x in (peaks, temperatures, top_k.int(), top_p)]
    restrict(logits.to(CUDA), torch.empty(0, vocab, device=CUDA), nowhere, *there, limits)
    # Division may differ in its last bit.
    kept = -scaled <= limits.cpu()[:, None] * (1 + 1e-6)
    for row, case in enumerate(cases):
        stray = (kept[row] ^ want[row]).nonzero().squeeze(1)
        assert scaled[row, stray].unique().numel() <= (1 if case[1] < 1 else 0), case
        if len(stray):
            of_k = scaled[row] >= thresholds(scaled[row, None], top_k[row, None], torch.ones(1), 0)
            masses = scaled[row].masked_fill(~of_k, -torch.inf).double().softmax(0)
            before = masses[scaled[row] > scaled[row, stray[0]]].sum().item()
            assert before == pytest.approx(case[1], abs=1e-5), case


def test_penalties_are_those_of_a_cpu_to_the_bit():
    from baton.layers.kernels.penalties import penalize as on_device

    torch.manual_seed(0)
    rows, vocab, slots = 4, 9001, 5
    logits = torch.randn(rows, vocab) * 3
    counts = torch.randint(0, 4, (slots, vocab)).float()
    prompt = torch.rand(slots, vocab) < 0.2
    repetition, presence, frequency = torch.rand(3, 2) + 0.5
    chosen, own = torch.tensor([3, 1]), torch.tensor([4, 0])
    want = logits[chosen].clone()
    penalize(want, counts[own], prompt[own], repetition, presence, frequency)
    counted = torch.full((rows,), -1, dtype=torch.int32)
    counted[chosen] = own.int()
    there = [x.to(CUDA) for x in (logits, chosen, counted, counts, prompt, repetition, presence, frequency)]
    assert torch.equal(on_device(*there).cpu(), want)
    counted[1] = -1
    there[2] = counted.to(CUDA)
    assert torch.equal(on_device(*there).cpu(), torch.stack((want[0], logits[1])))


def test_a_row_does_not_depend_on_the_others():
    """Sampled alone, and by the kernel that knows nothing but temperatures, it gets the same token."""
    vocab, rng = 20_000, random.Random(1)
    torch.manual_seed(1)
    logits = torch.randn(SLOTS, vocab, device=CUDA).bfloat16()
    slots, positions = np.arange(SLOTS), np.arange(SLOTS) * 5
    together = on_gpu(filled(rng, vocab)[1], logits, slots, positions).tokens.tolist()
    single = filled(random.Random(1), vocab)[1]
    for slot in range(SLOTS):
        at = slice(slot, slot + 1)
        assert on_gpu(single, logits[at], slots[at], positions[at]).tokens.tolist() == together[at]
    plain = filled(rng, vocab, SamplingParams(temperature=0.8, seed=3))[1]
    temperatures, keys = plain.simple(slots, positions)
    result = torch.zeros(SLOTS, 2, dtype=torch.int32, device=CUDA)
    last = torch.zeros(SLOTS, dtype=torch.int32, device=CUDA)
    from baton.layers.kernels.sampling import sample

    there = [torch.from_numpy(array).to(CUDA) for array in (temperatures, keys, slots.astype(np.int32))]
    sample(logits, *there, last, result)
    assert on_gpu(plain, logits, slots, positions).tokens.tolist() == result[:, 0].tolist()


def test_restrictions_cost_little():
    """Top-p 0.9 of the 50 most likely, 256 rows of a large vocabulary; measured 0.41 ms more a step."""
    rows, vocab = 256, 151_936
    logits = torch.randn(rows, vocab, device=CUDA).bfloat16() * 2
    slots, last = np.arange(rows), torch.zeros(rows + 1, dtype=torch.int32, device=CUDA)
    took = []
    for params in (
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=0.6, top_k=50, top_p=0.9),
    ):
        sampler = CudaSampler(rows, vocab, CUDA)
        for slot in range(rows):
            sampler.init(SlotInit(slot, params, slot, (), ()))
        times = []
        for step in range(12):
            # Behind work that covers the launches, so that the device's own time is measured.
            torch.cuda._sleep(4_000_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            sampler.sample(logits, slots, slots + step, last)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        took.append(sorted(times)[len(times) // 2])
    print(f"temperature {took[0]:.3f} ms, restricted {took[1]:.3f} ms")
    assert took[1] - took[0] < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 4096, 151_936])
def test_the_kernel_for_greedy_and_temperature(vocab, dtype):
    from baton.layers.kernels.sampling import sample

    torch.manual_seed(vocab)
    rows = 96
    logits = (torch.randn(rows, vocab) * 2).to(dtype)
    sampler, of_gpu = Sampler(rows, vocab, CPU), CudaSampler(rows, vocab, CUDA)
    for slot in range(rows):
        temperature = (0.0, 0.6, 1.0, 3.0)[slot % 4]
        for each in (sampler, of_gpu):
            each.init(SlotInit(slot, SamplingParams(temperature=temperature), slot * 2**57 + 11, (), ()))
    slots, positions = np.random.default_rng(0).permutation(rows), np.arange(rows) * 37
    want = sampler.sample(logits.float().clone(), slots, positions)
    temperatures, keys = of_gpu.simple(slots, positions)
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


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_logits_near_the_least_that_there_is(temperature):
    from baton.layers.kernels.sampling import sample

    logits = torch.full((3, 3001), -3.3e38, device=CUDA)
    logits[:, 3000] = -3.1e38
    result = torch.zeros(3, 2, dtype=torch.int32, device=CUDA)
    zeros = torch.zeros(3, device=CUDA)
    last = torch.zeros(1, dtype=torch.int32, device=CUDA)
    sample(logits, zeros + temperature, zeros.long(), zeros.int(), last, result)
    assert result[:, 0].tolist() == [3000] * 3


def test_the_kernel_tells_of_logits_that_are_not_numbers():
    from baton.layers.kernels.sampling import sample

    logits = torch.randn(3, 9000, device=CUDA)
    logits[1, 8000] = torch.nan
    result = torch.zeros(3, 2, dtype=torch.int32, device=CUDA)
    zeros = torch.zeros(3, device=CUDA)
    sample(logits, zeros, zeros.long(), zeros.int(), torch.zeros(1, dtype=torch.int32, device=CUDA), result)
    assert result[:, 1].cpu().view(torch.float32).isfinite().tolist() == [True, False, True]
