"""Masks in the sampler: a constrained row samples as if the forbidden logits were not there, the others as
ever."""

import threading
import time
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.engine import grammar_masks
from baton.engine.grammar_masks import CHEAP_SECONDS, GrammarMasks
from baton.engine.plan import PlanRow, SlotInit
from baton.engine.sampler import Sampler, row_results
from baton.engine.sampling_params import SamplingParams
from baton.grammar.base import GrammarError, Matcher

VOCAB, EOS = 301, 7
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.7),
    SamplingParams(temperature=1.5, top_k=200, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, logprobs=3),
    SamplingParams(temperature=0.0, logit_bias={5: 3.0, 9: -50.0}),
]


class EveryThird(Matcher):
    """After n tokens those are allowed whose id is n modulo 3, and the end after four."""

    def __init__(self):
        self.tokens = []

    def matcher(self):
        return EveryThird()

    def accept(self, tokens):
        for token in tokens:
            assert token in self.allowed(), "sampled what was forbidden"
            self.tokens.append(token)

    def allowed(self):
        count = len(self.tokens)
        if count > 6:
            return [EOS]
        return [id for id in range(VOCAB) if id % 3 == count % 3 or (count >= 4 and id == EOS)]

    def fill(self, words):
        words[:] = mask_of(self.allowed())


class Broken(EveryThird):
    def matcher(self):
        return self

    def fill(self, words):
        raise GrammarError("too complex")


def mask_of(ids):
    bits = np.zeros(-(-VOCAB // 32) * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def make(params, grammars, outputs=None):
    sampler = Sampler(len(params), VOCAB, CPU)
    for slot, (own, grammar) in enumerate(zip(params, grammars, strict=True)):
        output = tuple(outputs[slot]) if outputs else ()
        sampler.init(SlotInit(slot, own, 100 + slot, (1, 2, 3), output, grammar=grammar))
    return sampler


def step(sampler, logits, position):
    slots = np.arange(len(logits))
    pending = sampler.begin_masks(slots.tolist())
    return sampler.sample(logits.clone(), slots, np.full(len(logits), position), pending)


def random_logits(seed, rows):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("params", PARAMS)
def test_as_if_the_forbidden_logits_were_not_there(params):
    """And with the same noise: the outcome stays a function of logits, mask, parameters, seed and
    position."""
    constrained, free = make([params], [EveryThird()]), make([params], [None])
    matcher, output = EveryThird(), []
    for position in range(7):
        logits = random_logits(position, 1)
        forbidden = torch.ones(VOCAB, dtype=torch.bool)
        forbidden[matcher.allowed()] = False
        want = step(free, logits.masked_fill(forbidden, -torch.inf), position)
        got = step(constrained, logits, position)
        assert got.tokens.tolist() == want.tokens.tolist()
        # Log-probabilities and the check for damaged logits see the unmodified ones.
        assert got.peaks.tolist() == logits.amax(-1).tolist()
        if params.logprobs is not None:
            (read,) = got.logprobs.read(got.logprob_counts)
            assert read.logprob == pytest.approx(float(logits.log_softmax(-1)[0, read.token]), abs=1e-5)
            assert [token for token, _ in read.top] == logits[0].topk(3).indices.tolist()
        output += got.tokens.tolist()
        matcher.accept(got.tokens.tolist())
    assert len(set(output)) > 1


class Costly(EveryThird):
    """Takes longer than masks may in the step thread; notes where it ran."""

    def __init__(self, threads):
        super().__init__()
        self.threads = threads

    def matcher(self):
        return Costly(self.threads)

    def fill(self, words):
        self.threads.append(threading.current_thread())
        super().fill(words)
        began = time.thread_time()
        while time.thread_time() < began + 3 * CHEAP_SECONDS:
            pass


def test_costly_masks_leave_the_step_thread():
    threads = []
    costly, cheap = make(PARAMS[1:2], [Costly(threads)]), make(PARAMS[1:2], [EveryThird()])
    for position in range(4):
        logits = random_logits(position, 1)
        assert step(costly, logits, position).tokens.tolist() == step(cheap, logits, position).tokens.tolist()
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False, False, False]


def test_other_rows_do_not_notice():
    params = [*PARAMS, *PARAMS]
    alone, beside = (
        make(PARAMS, [None] * len(PARAMS)),
        make(params, [None] * len(PARAMS) + [EveryThird()] * 7),
    )
    for position in range(6):
        logits = random_logits(position, len(PARAMS))
        want = step(alone, logits, position).tokens.tolist()
        assert step(beside, torch.cat([logits, logits]), position).tokens.tolist()[: len(PARAMS)] == want


@pytest.mark.parametrize("rows", [[0, 1], [2, 3], [1, 3], [0, 2, 3]])
def test_masks_reach_their_own_rows(rows):
    """Of one step, also if other special rows are between them."""
    logits, allowed = random_logits(3, 4), [id for id in range(VOCAB) if id % 3 == 0]
    params = [SamplingParams(temperature=0.0, logit_bias={5: 0.0})] * 4
    found = step(make(params, [EveryThird() if i in rows else None for i in range(4)]), logits, 0)
    for row, token in enumerate(found.tokens.tolist()):
        best = allowed[int(logits[row, allowed].argmax())] if row in rows else int(logits[row].argmax())
        assert token == best


def test_a_slot_goes_on_from_its_output_alone():
    """A resume, a retraction, a hand-off: another slot, another process, the same tokens."""
    grammars = [EveryThird()] * len(PARAMS)
    whole, outputs = make(PARAMS, grammars), [[] for _ in PARAMS]
    again = None
    for position in range(6):
        if position == 3:
            again = make(PARAMS, grammars, outputs)
        logits = random_logits(position, len(PARAMS))
        tokens = step(whole, logits, position).tokens.tolist()
        if again is not None:
            assert step(again, logits, position).tokens.tolist() == tokens
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)


def test_a_slot_that_passes_on_forgets_its_grammar():
    sampler = make([SamplingParams(temperature=0.0)], [EveryThird()])
    logits = torch.zeros(1, VOCAB)
    logits[0, 100] = 9.0  # not 0 modulo 3
    assert step(sampler, logits, 0).tokens.tolist() != [100]
    sampler.init(SlotInit(0, SamplingParams(temperature=0.0), 0, (), ()))
    assert step(sampler, logits, 0).tokens.tolist() == [100]


def test_min_tokens_hold_while_the_output_can_go_on():
    params = SamplingParams(temperature=0.0, min_tokens=50, stop_token_ids=frozenset({EOS, 3}))
    sampler = make([params], [EveryThird()])
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 3] = 9.0, 8.0
    tokens = [step(sampler, logits, position).tokens.item() for position in range(8)]
    assert EOS not in tokens[:7]
    assert 3 not in tokens[:7]
    assert tokens[7] == EOS  # nothing else is left


def test_without_min_tokens_a_stop_token_may_come_at_once():
    params = SamplingParams(temperature=0.0, stop_token_ids=frozenset({EOS, 3}))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 8.0
    assert step(make([params], [EveryThird()]), logits, 0).tokens.tolist() == [3]


def test_a_grammar_that_fails_fails_its_row_alone():
    params = [SamplingParams(temperature=0.0)] * 3
    sampler = make(params, [None, Broken(), EveryThird()])
    result = step(sampler, random_logits(0, 3), 0)
    assert list(result.errors) == [1]
    rows = [PlanRow(slot, None, 4, ((0,),), (slot,)) for slot in range(3)]
    first, second, third = row_results(rows, result.tokens.tolist(), [True] * 3, {}, {}, result.errors, {})
    assert first.error is None
    assert third.error is None
    assert second.reason == "GRAMMAR_FAILED"
    assert "too complex" in second.error


def test_a_mask_waits_for_the_token_before_it():
    """On a GPU, where a step is launched before the tokens of the step before are known."""
    grammars = GrammarMasks(VOCAB)
    grammars.init(SlotInit(4, PARAMS[0], 0, (), (0, 1), grammar=EveryThird()))
    assert grammars.constrained([3, 4]) == [1]
    assert grammars.ready([3, 4], [1])
    masks = grammars.begin([3, 4], [1], {}).result()
    assert (masks.words[0] == mask_of([id for id in range(VOCAB) if id % 3 == 2])).all()
    masks.launched()
    assert not grammars.ready([3, 4], [1])
    # Meanwhile the slot passes to another sequence: what was sampled belongs to the first.
    first = masks.outputs[0]
    grammars.init(SlotInit(4, PARAMS[0], 0, (), (), grammar=EveryThird()))
    assert grammars.ready([3, 4], [1])
    masks.sampled([5])
    assert first.tokens == [5]
    fresh = grammars.begin([3, 4], [1], {}).result()
    assert (fresh.words[0] == mask_of([id for id in range(VOCAB) if id % 3 == 0])).all()
    assert grammars.stats.masks == 2


def test_a_stop_token_that_comes_too_early_is_forbidden_where_the_grammar_has_another():
    grammars = GrammarMasks(VOCAB)
    grammars.init(SlotInit(0, PARAMS[0], 0, (), (), grammar=EveryThird()))
    allowed = range(0, VOCAB, 3)
    for few in ([0], [33, 96], [3, 66, 297], [*allowed[1:]]):
        masks = grammars.begin([0], [0], {0: few}).result()
        assert (masks.words[0] == mask_of([id for id in allowed if id not in few])).all()
    assert (grammars.begin([0], [0], {0: [*allowed]}).result().words[0] == mask_of(allowed)).all()


def test_masks_for_a_device_equal_those_for_the_host():
    grammars = GrammarMasks(VOCAB)
    grammars.init(SlotInit(0, PARAMS[0], 0, (), (), grammar=EveryThird()))
    masks = grammars.begin([0], [0], {}).result()
    logits = random_logits(0, 3)
    host = logits.clone()
    masks.apply(host, [1])
    assert torch.equal(host[[0, 2]], logits[[0, 2]])
    bits = np.unpackbits(masks.on(CPU).numpy().view(np.uint8), bitorder="little")[:VOCAB]
    assert torch.equal(host[1], logits[1].masked_fill(torch.from_numpy(bits == 0), -torch.inf))
    assert masks.row_index(3).tolist() == [0, -1, -1]


def test_what_masks_take_is_added_up(monkeypatch):
    ticks = count()
    clocks = SimpleNamespace(perf_counter=lambda: float(next(ticks)), thread_time=lambda: 0.0)
    monkeypatch.setattr(grammar_masks, "time", clocks)
    grammars = GrammarMasks(VOCAB)
    grammars.init(SlotInit(0, PARAMS[0], 0, (), (), grammar=EveryThird()))
    for _ in range(2):
        grammars.compute([0], [0], {})  # looks at the clock before, in between twice, and behind
    assert (grammars.stats.masks, grammars.stats.seconds, grammars.stats.waited) == (2, 2.0, 6.0)
    grammars.wait(grammars.begin([0], [0], {}))
    assert (grammars.stats.masks, grammars.stats.seconds, grammars.stats.waited) == (3, 3.0, 10.0)
