"""Rows with drafts: whatever a drafter guesses, outputs are those without."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hash_runner import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Engine, check_outputs, request

from baton.engine.draft.base import Drafter
from baton.engine.draft.oracle import OracleDrafter, prompt_digest
from baton.engine.draft.suffix import SuffixDrafter, SuffixIndex
from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.request import EngineFinishReason
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Refused
from baton.engine.timed_runner import TimedRunner
from baton.rpc.metrics import LoadCollector
from baton.step_cost import StepCost
from baton.v1 import node_pb2
from baton.worker.load import snapshot


def oracle(requests, right):
    """Knows the outputs of requests whose parameters are those of `test_scheduler.request`."""
    known = []
    for r in requests:
        for choice in range(r.n):
            output = reference(
                list(r.prompt), r.params.seed + choice, r.params.max_tokens, penalized=r.params.penalized
            )
            known.append((prompt_digest(r.prompt), output))
    return OracleDrafter(known, right)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("right", "steps"), [(1.0, 1 + 5), (0.0, 20)])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(overlap, right, steps):
    r = request("a", range(10), max_tokens=20)
    engine = Engine(overlap=overlap, drafter=oracle([r], right), draft_tokens=3)
    engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, [r])
    assert engine.finish[("a", 0)] is EngineFinishReason.LENGTH
    # One step computes the prompt; each of the others delivers four tokens, or one.
    assert engine.scheduler.step_number == steps
    drafts = engine.scheduler.drafts
    assert drafts.accepted == (drafts.drafted if right else [0] * 3)


def test_a_stop_inside_what_was_accepted_ends_the_output():
    prompt = list(range(10))
    expected = reference(prompt, 1, 20)
    r = request("a", prompt, max_tokens=20, stop_token_ids=frozenset({expected[5]}))
    engine = Engine(drafter=oracle([r], 1.0), draft_tokens=7)
    engine.scheduler.submit(r)
    engine.run()
    assert engine.tokens[("a", 0)] == expected[:6]
    assert engine.finish[("a", 0)] is EngineFinishReason.STOP


def test_pages_in_the_tree_hold_what_was_accepted():
    """A second request that goes on behind the first one's output finds its pages."""
    first = request("a", range(10), max_tokens=20)
    engine = Engine(drafter=oracle([first], 0.5), draft_tokens=7)
    engine.scheduler.submit(first)
    engine.run()
    second = request("b", [*range(10), *engine.tokens[("a", 0)], 5], max_tokens=5)
    engine.scheduler.submit(second)
    engine.run()
    check_outputs(engine, [first, second])
    assert second.cached_tokens == 28


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    overlap=st.booleans(),
    pages=st.integers(10, 40),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    most=st.integers(1, 7),
)
def test_any_mix_of_arrivals_cancels_and_pressure(seed, overlap, pages, right, most):
    rng = random.Random(seed)
    prefixes = [[rng.randrange(900) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    requests = [
        request(
            key,
            rng.choice(prefixes) + [rng.randrange(900) for _ in range(rng.randrange(0, 6))],
            max_tokens=rng.randrange(1, 25),
            seed=rng.randrange(99),
            n=rng.choice([1, 1, 1, 2, 3]),
            stop_token_ids=frozenset(rng.sample(range(1000), rng.choice([0, 0, 50]))),
            presence_penalty=rng.choice([0.0, 0.5]),
            min_tokens=rng.choice([0, 0, 5]),
        )
        for key in range(rng.randrange(1, 16))
    ]
    engine = Engine(
        pages=pages,
        budget=rng.choice([8, 16, 64]),
        overlap=overlap,
        output_margin=rng.choice([0, 4, 16]),
        context_length=min(200, pages * 4),
        drafter=oracle(requests, right),
        draft_tokens=most,
    )
    accepted, cancelled = [], set()
    for r in requests:
        r.priority = rng.randrange(3)
        try:
            engine.scheduler.submit(r)
        except Refused:
            continue
        accepted.append(r)
        for _ in range(rng.randrange(4)):
            engine.turn()
        if rng.random() < 0.25:
            victim = rng.choice(accepted)
            if victim.key in engine.scheduler.requests:
                engine.scheduler.close(victim)
                cancelled.add(victim.key)
    engine.run()
    check_outputs(engine, accepted, cancelled)


def test_the_oracle_spoils_the_share_that_it_is_told_to():
    r = request("a", range(10), max_tokens=2000)
    known = reference(list(range(10)), 1, 2000)
    drafter = OracleDrafter([(prompt_digest(r.prompt), known)], 0.7)
    drafts = drafter.draft(r.sequences[0], 2000)
    same = Counter(a == b for a, b in zip(drafts, known, strict=True))
    assert 0.65 < same[True] / 2000 < 0.75


def test_suffixes_that_occurred_before():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    sequence = request("a", text).sequences[0]
    drafter = SuffixDrafter()
    assert drafter.draft(sequence, 9) == [5, 6, 7, 8, 9, 1, 2, 3, 4] and drafter.draft(sequence, 9) == ()
    for token, drafts in ((5, [6, 7, 8, 9, 1]), (60, ()), (2, ()), (3, ()), (4, [5, 60, 2])):
        sequence.tokens.append(token)
        assert drafter.draft(sequence, 9)[: len(drafts) or 1] == drafts


def test_short_matches_before_any_draft_was_right():
    """Three tokens are enough in the prompt, unless its message ends there, but not in the own output."""
    r = request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 10, 20, 2, 3, 4], stop_token_ids=frozenset({50}))
    sequence, drafter = r.sequences[0], SuffixDrafter()
    assert drafter.draft(sequence, 3) == [5, 6, 7]
    for token in (30, 7, 8):
        sequence.tokens.append(token)
        assert drafter.draft(sequence, 3) == ()
    sequence.tokens.append(9)
    assert drafter.draft(sequence, 3) == ()  # 50 stops
    sequence.tokens += [31, 32, 33, 34, 35, 36, 31, 41, 32, 33, 34]
    assert drafter.draft(sequence, 3) == ()
    r.accepted_drafts = 1
    sequence.tokens += [42, 32, 33, 34]
    assert drafter.draft(sequence, 3) == [42, 32, 33]


def test_a_text_that_is_followed_goes_before_a_newer_one():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 30, 3, 4, 5, 40, 1, 2, 3, 4]
    sequence = request("a", text).sequences[0]
    drafter = SuffixDrafter()
    assert drafter.draft(sequence, 2) == [5, 6]
    sequence.tokens.append(5)  # (3, 4, 5) last went on with 40, but (1, 2, 3, 4, 5) with 6
    assert drafter.draft(sequence, 2) == [6, 7]
    sequence.tokens += [40, 1, 2]
    assert drafter.draft(sequence, 2) == [3, 4]  # a longer match than the one followed


def test_suffixes_of_a_text_that_repeats_itself():
    sequence = request("a", [7, 8] * 10).sequences[0]
    assert SuffixDrafter().draft(sequence, 6) == [7, 8, 7, 8, 7, 8]


@pytest.mark.parametrize("lengths", [(100, 1, 1, 3, 200, 1), (3, 70, 66, 2), (1, 1, 1, 1, 65)])
def test_suffixes_learned_at_once_or_one_by_one(lengths):
    rng = random.Random(1)
    tokens = [rng.randrange(6) for _ in range(sum(lengths))]
    several, single, count = SuffixIndex(), SuffixIndex(), 0
    for length in lengths:
        found = None
        for _ in range(length):
            count += 1
            found = single.extend(tokens[:count])
        assert several.extend(tokens[:count]) == found


def test_the_first_step_behind_a_prompt_waits_for_a_search_alone():
    """The index is made when the second is planned, which the device need not wait for."""
    index, tokens = SuffixIndex(), [*range(1000), *range(500, 510)]
    assert index.extend(tokens) == 509 and not index._ends
    assert index.extend([*tokens, 510]) == 510 and len(index._ends) == 1000
    # Of many tokens at once that have not occurred among themselves, too.
    assert index.extend([*tokens, 510, *range(2000, 2100), 700, 701, 702]) == 702


def test_rows_with_a_grammar_have_no_drafts_where_their_masks_come_late():
    plain, constrained = request("a", range(10), max_tokens=20), request("b", range(20), max_tokens=20)
    constrained.grammar = object()
    engine = Engine(drafter=oracle([plain, constrained], 1.0), draft_tokens=3, draft_grammars=False)
    for r in (plain, constrained):
        engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, [plain, constrained])
    drafted = {row.slot for plan in engine.runner.steps for row in plan.rows if row.drafts}
    assert len(drafted) == 1


def test_metrics_tell_drafts_by_drafter_and_place():
    r = request("a", range(10), max_tokens=40)
    engine = Engine(drafter=oracle([r], 0.7), draft_tokens=3)
    engine.scheduler.submit(r)
    engine.run()
    load = snapshot(engine.scheduler, 0)
    assert (r.drafted_tokens, r.accepted_drafts) == (load.drafted_tokens, load.accepted_drafts)
    collector = LoadCollector(lambda: "decode", lambda: load, node_pb2.NodeInfo)
    drafts = next(each for each in collector.collect() if each.name == "baton_drafts")
    counts = {(s.labels["place"], s.labels["outcome"]): s.value for s in drafts.samples}
    assert {s.labels["drafter"] for s in drafts.samples} == {"oracle"}
    right = [counts[str(place), "right"] for place in (1, 2, 3)]
    assert sum(right) == load.accepted_drafts > 0 and right == sorted(right, reverse=True)
    assert sum(counts.values()) == load.drafted_tokens > load.accepted_drafts


def test_a_runner_that_only_takes_time_says_the_same_with_drafts():
    cost = StepCost(0.001, 0.0, 0.0, 0.0, 0.0)
    runner = TimedRunner(cost, max_slots=1, vocab_size=500, sleep=lambda seconds: None)
    init = SlotInit(0, SamplingParams(seed=3), 3, (), ())
    plans = [
        StepPlan(number, (PlanRow(0, None, 9, ((0,),), (0,), drafts=drafts),), (init,))
        for number, drafts in enumerate(((), (4, 5)), 1)
    ]
    one, other = (runner.read(runner.launch(plan)).rows[0].tokens for plan in plans)
    assert one == other


class Failing(Drafter):
    def __init__(self, where):
        self.where, self.asked = where, 0

    def prepare(self, wanted):
        self.fail("prepare")

    def draft(self, sequence, most):
        self.fail("draft")
        return ()

    def fail(self, where):
        self.asked += 1
        if where == self.where:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["prepare", "draft"])
def test_a_drafter_that_fails_costs_drafts_and_no_request(where):
    r = request("a", range(10), max_tokens=20)
    drafter = Failing(where)
    engine = Engine(drafter=drafter, draft_tokens=3)
    engine.scheduler.submit(r)
    engine.run()
    check_outputs(engine, [r])
    assert "out of memory" in engine.scheduler.drafts.broken and drafter.asked <= 3


def test_hidden_states_behind_images_reach_no_drafter():
    """Which reads tokens, and an image's are none."""
    engine = Engine(drafter=Failing("observe"), draft_tokens=3)
    sequence = request("a", range(10)).sequences[0]
    seen = []
    engine.scheduler.drafts.drafter.observe = lambda *given: seen.append(given)
    engine.scheduler.drafts.observe(sequence, torch.zeros(2, 4), 10)
    sequence.request.images = (object(),)
    engine.scheduler.drafts.observe(sequence, torch.zeros(2, 4), 10)
    assert len(seen) == 1
