"""The sampler against a slow, obvious one in float64, one row at a time, and against probability."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from baton.engine.plan import PlanRow, SlotInit
from baton.engine.sampler import Sampler, row_results, token_logprobs
from baton.engine.sampler_ops import FIRST_GROUP, draw, gumbel, row_keys, thresholds
from baton.engine.sampling_params import SamplingParams

VOCAB = 3000
MASK = 2**64 - 1


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def reference_noise(seed, position, token):
    gamma = 0x9E3779B97F4A7C15
    key = mix((mix((seed + gamma) & MASK) + (position + 1) * gamma) & MASK)
    bits = mix((key + (token + 1) * gamma) & MASK) >> 11
    return -math.log(-math.log1p(-min((bits + 0.5) * 2.0**-53, 1 - 2.0**-24)))


def reference_logits(logits, params, prompt, output):
    """Of what is chosen from, float64 [vocab]; -inf where forbidden."""
    x = logits.astype(np.float64).copy()
    counts = Counter(output)
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token, count in counts.items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        x[list(params.stop_token_ids)] = -math.inf
    if params.greedy:
        return x
    x = x / params.temperature
    if params.top_k:
        x[x < np.sort(x)[::-1][: params.top_k][-1]] = -math.inf
    if params.top_p < 1:
        p = np.exp(x - x.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        total = 0.0
        for rank, token in enumerate(order):
            if rank and total >= params.top_p:
                x[x < x[order[rank - 1]]] = -math.inf
                break
            total += p[token]
    if params.min_p:
        x[x < x.max() + math.log(params.min_p)] = -math.inf
    return x


GROUP = 256


def is_chosen(token, x, params, seed, position):
    """Whether the reference takes it as well, but for what float32 cannot tell apart."""

    def wins(scores, index):
        return scores[index] >= max(scores.values()) - 2e-5

    if params.greedy:
        return x[token] >= x.max() - 2e-5
    possible = np.flatnonzero(np.isfinite(x)).tolist()
    masses = Counter()
    for t in possible:
        masses[t // GROUP] += math.exp(x[t] - x.max())
    groups = {g: math.log(m) + reference_noise(seed, position, FIRST_GROUP + g) for g, m in masses.items()}
    group = token // GROUP
    inside = {t: x[t] + reference_noise(seed, position, t) for t in possible if t // GROUP == group}
    return token in inside and wins(groups, group) and wins(inside, token)


def random_params(rng):
    def maybe(value, default):
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=maybe(0.0, rng.choice([0.3, 0.7, 1.0, 2.5])),
        top_k=maybe(rng.choice([1, 2, 17, 500, VOCAB + 5]), 0),
        top_p=maybe(rng.choice([0.01, 0.5, 0.9, 0.999]), 1.0),
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


@pytest.mark.parametrize("case", range(6))
def test_equals_the_reference_for_any_mix_of_parameters(case):
    rng = random.Random(case)
    torch.manual_seed(case)
    slots = 12
    sampler = Sampler(slots, VOCAB, torch.device("cpu"))
    params = [random_params(rng) for _ in range(slots)]
    prompts = [[rng.randrange(90) for _ in range(20)] for _ in range(slots)]
    outputs = [[rng.randrange(90) for _ in range(rng.randrange(5))] for _ in range(slots)]
    for slot in range(slots):
        sampler.init(
            SlotInit(slot, params[slot], params[slot].seed, tuple(prompts[slot]), tuple(outputs[slot]))
        )
    for _ in range(5):
        chosen = rng.sample(range(slots), rng.randrange(1, slots + 1))
        positions = [len(prompts[s]) + len(outputs[s]) for s in chosen]
        logits = torch.randn(len(chosen), VOCAB) * 3
        samples = sampler.sample(logits.clone(), np.array(chosen), np.array(positions))
        tokens = samples.tokens.tolist()
        for row, (slot, position) in enumerate(zip(chosen, positions, strict=True)):
            own = params[slot]
            x = reference_logits(logits[row].numpy(), own, prompts[slot], outputs[slot])
            assert is_chosen(tokens[row], x, own, own.seed, position), own
            outputs[slot].append(tokens[row])
        wanted = [row for row, slot in enumerate(chosen) if params[slot].logprobs is not None]
        assert samples.logprob_rows == wanted
        if samples.logprobs is not None:
            expected = logits.double().log_softmax(-1)
            for row, entry in zip(wanted, samples.logprobs.read(samples.logprob_counts), strict=True):
                assert entry.token == tokens[row]
                assert entry.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
                assert len(entry.top) == params[chosen[row]].logprobs
                best = expected[row].topk(max(1, len(entry.top)))
                assert [t for t, _ in entry.top] == best.indices.tolist()[: len(entry.top)]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(temperature=0.0)]
)
def test_ordinary_requests_equal_the_reference(params):
    """Without penalties, biases and log-probabilities, which take a way of their own."""
    sampler = Sampler(2, VOCAB, torch.device("cpu"))
    for slot in range(2):
        sampler.init(SlotInit(slot, params, 7 + slot, (1, 2), ()))
    best = 0
    for position in range(40):
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(position))
        tokens = sampler.sample(logits.clone(), np.arange(2), np.full(2, position)).tokens.tolist()
        for slot, token in enumerate(tokens):
            x = reference_logits(logits[slot].numpy(), params, [1, 2], [])
            assert is_chosen(token, x, params, 7 + slot, position)
            best += token == x.argmax()
    assert best == 80 if params.greedy else best < 60


def test_a_slot_forgets_what_it_held():
    sampler = Sampler(1, 10, torch.device("cpu"))
    logits = torch.tensor([[5.0, 4.9, 0, 0, 0, 0, 0, 0, 0, 0]])
    punished = SamplingParams(temperature=0.0, presence_penalty=1.0)

    def sample():
        return sampler.sample(logits.clone(), np.array([0]), np.array([7])).tokens.item()

    sampler.init(SlotInit(0, punished, 0, (), (0,)))
    assert sample() == 1
    sampler.init(SlotInit(0, punished, 0, (), ()))
    assert [sample(), sample()] == [0, 1]
    sampler.init(SlotInit(0, SamplingParams(temperature=0.0), 0, (), ()))
    assert [sample(), sample()] == [0, 0]


def test_an_output_that_is_resumed_counts_for_the_least_length():
    """Stop tokens are kept out of the first `min_tokens` only, wherever these were sampled."""
    sampler = Sampler(1, 10, torch.device("cpu"))
    logits = torch.tensor([[0.0, 5.0, 9.0, 0, 0, 0, 0, 0, 0, 0]])
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=frozenset({2}))
    for before, expected in ((0, [1, 1, 1, 2]), (2, [1, 2]), (3, [2])):
        sampler.init(SlotInit(0, params, 0, (4,), (1,) * before))
        found = [
            sampler.sample(logits.clone(), np.array([0]), np.array([1 + before + i])).tokens.item()
            for i in range(len(expected))
        ]
        assert found == expected


def chi_square(counts, probabilities, draws):
    return sum((n - draws * p) ** 2 / (draws * p) for n, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("spread", [1, 150])
def test_draws_follow_the_softmax(vary, spread):
    """`spread`: ids from one to the next, so that several share a group, and so that hardly any two do."""
    weights = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    logits = torch.full((8 * spread,), -torch.inf)
    logits[::spread] = weights
    draws = 40_000
    numbers, fixed = np.arange(draws, dtype=np.uint64), np.full(draws, 12345, np.uint64)
    keys = row_keys(fixed, numbers) if vary == "position" else row_keys(numbers, fixed)
    floor = torch.full((draws,), -20.0) if spread > 1 else None
    tokens = draw((logits - 2).expand(draws, -1), floor, torch.from_numpy(keys))
    counts = torch.bincount(tokens, minlength=8 * spread)
    assert counts.sum() == counts[::spread].sum()
    # 7 degrees of freedom: 29.9 is passed once in 10,000.
    assert chi_square(counts[::spread].tolist(), weights.softmax(0).tolist(), draws) < 29.9


def test_rounding_seldom_changes_a_draw():
    """A resumed request, or one in another batch, sees its logits rounded otherwise."""
    torch.manual_seed(0)
    draws, keys = 4000, row_keys(np.arange(4000, dtype=np.uint64), np.zeros(4000, np.uint64))
    logits = torch.randn(draws, 8192) * 3
    logits -= logits.amax(-1, keepdim=True)
    first, second = (
        draw(logits + noise * torch.randn_like(logits), None, torch.from_numpy(keys)) for noise in (0, 0.03)
    )
    assert 0 < (first != second).float().mean().item() < 0.05


def test_no_id_beyond_the_vocabulary_is_drawn():
    """The last group of ids is not full."""
    logits = torch.full((200, 257), -50.0)
    logits[:, 256] = 0.0
    keys = torch.from_numpy(row_keys(np.arange(200, dtype=np.uint64), np.zeros(200, np.uint64)))
    assert draw(logits, None, keys).tolist() == [256] * 200


def test_consecutive_positions_and_seeds_are_independent():
    """Pairs of draws at neighbouring positions, and at neighbouring seeds, fill a 4 x 4 table evenly."""
    draws = 20_000
    logits = torch.zeros(draws, 4)

    def tokens(seeds, positions):
        keys = torch.from_numpy(row_keys(np.uint64(1) * seeds, np.uint64(1) * positions))
        return draw(logits, None, keys)

    numbers, zero = np.arange(draws, dtype=np.uint64), np.zeros(draws, np.uint64)
    one = np.ones(draws, np.uint64)
    for first, second in (
        (tokens(zero, numbers), tokens(zero, numbers + one)),
        (tokens(numbers, zero), tokens(numbers + one, zero)),
        (tokens(numbers, zero), tokens(numbers, one)),
    ):
        table = torch.bincount(first * 4 + second, minlength=16).tolist()
        # 15 degrees of freedom: 44.3 is passed once in 10,000.
        assert chi_square(table, [1 / 16] * 16, draws) < 44.3


def test_noise_equals_the_reference():
    keys = torch.from_numpy(row_keys(np.arange(50, dtype=np.uint64), np.full(50, 9, np.uint64)))
    noise = gumbel(keys[:, None], torch.arange(20_000))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    for seed, token in ((0, 0), (7, 19_999), (49, 5)):
        assert noise[seed, token].item() == pytest.approx(reference_noise(seed, 9, token), abs=1e-5)


def unmix(z):
    z ^= (z >> 31) ^ (z >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


@pytest.mark.parametrize(("bits", "noise"), [(MASK, -math.log(24 * math.log(2))), (0, 54 * math.log(2))])
def test_the_rarest_noise_is_finite(bits, noise):
    """Where a float32 could be 1, or 0."""
    key = np.array([[(unmix(bits) - 0x9E3779B97F4A7C15) & MASK]], np.uint64).view(np.int64)
    assert gumbel(torch.from_numpy(key), torch.tensor([0])).item() == pytest.approx(noise, abs=1e-5)


def test_top_p_and_top_k_cut_where_they_should_and_keep_ties():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05]]).log()
    for top_k, top_p, kept in (
        (0, 0.39, 1),
        (0, 0.41, 2),
        (0, 0.71, 3),
        (0, 0.96, 5),
        (2, 1.0, 2),
        (4, 1.0, 5),
        (2, 0.56, 1),
        (2, 0.58, 2),
        (9, 1.0, 5),
    ):
        floor = thresholds(logits, torch.tensor([top_k]), torch.tensor([top_p]), top_k)
        assert int((logits >= floor[:, None]).sum()) == kept, (top_k, top_p)


def test_top_p_of_flat_logits_needs_more_than_the_first_candidates():
    logits = torch.zeros(2, VOCAB)
    logits[1] = torch.linspace(0, 0.5, VOCAB)
    floor = thresholds(logits, torch.zeros(2, dtype=torch.int64), torch.tensor([0.5, 0.9]), 0)
    kept = logits[1] >= floor[1]
    assert int((logits[0] >= floor[0]).sum()) == VOCAB
    assert logits[1].softmax(0)[kept].sum().item() == pytest.approx(0.9, abs=1e-3)


def test_tiny_temperature_is_greedy_and_never_garbage():
    sampler = Sampler(1, 50, torch.device("cpu"))
    sampler.init(SlotInit(0, SamplingParams(temperature=1e-40, top_p=0.5), 1, (), ()))
    logits = torch.randn(1, 50)
    samples = sampler.sample(logits, np.array([0]), np.array([3]))
    assert samples.tokens.item() == logits.argmax().item()


def test_a_large_top_k_does_not_depend_on_rows_without_one():
    """More than the candidates that are looked at first, beside a row whose top-k keeps all."""
    torch.manual_seed(0)
    logits = torch.randn(2, 4000)
    top_k, top_p = torch.tensor([2500, 0]), torch.tensor([0.5, 0.9])
    together = thresholds(logits, top_k, top_p, 0)
    assert together[0] == thresholds(logits[:1], top_k[:1], top_p[:1], 2500)[0]
    assert together[1] == thresholds(logits[1:], top_k[1:], top_p[1:], 0)[0]


def test_all_that_tie_with_the_last_of_top_k_count_for_top_p():
    """Also those beyond the candidates that are looked at first: 45 tokens, then 59 that tie."""
    logits = torch.cat((torch.linspace(3.25, 4.5, 45), torch.full((59,), 3.0), torch.zeros(400)))[None]
    top_k, top_p = torch.tensor([50]), torch.tensor([0.9])
    floor = thresholds(logits, top_k, top_p, 50)
    assert int((logits >= floor).sum()) == 45 + 59
    assert floor == thresholds(logits, top_k, top_p, 400)


def test_a_vocabulary_has_no_more_log_probabilities_than_tokens():
    found = token_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2]), 5)
    ((only),) = found.read([5])
    assert only.token == 2 and [token for token, _ in only.top] == [1, 2, 0]
    assert math.fsum(math.exp(value) for _, value in only.top) == pytest.approx(1.0)


def test_rows_that_sample_one_token_may_have_prompt_log_probabilities():
    part = token_logprobs(torch.zeros(2, 4), torch.tensor([2, 3]), 1)
    rows = [PlanRow(0, (1, 2, 3), 0, ((0,),), (0,), (2, 3), 1), PlanRow(1, None, 5, ((1,),), (1,))]
    first, second = row_results(rows, [7, 8], [True, True], {}, {0: [part]}, {}, {})
    assert (first.tokens, second.tokens) == ((7,), (8,)) and not second.prompt_logprobs
    assert [entry.token for entry in first.prompt_logprobs] == [2, 3]
