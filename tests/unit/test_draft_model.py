"""A draft model: texts are those without it, whatever it says; one that says the same is always right."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from hash_runner import HashRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_scheduler import Engine, check_outputs, request

from baton.config import DecodeConfig
from baton.engine.draft.model import ModelDrafter
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Refused
from baton.model_path import CheckpointError
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError
from baton.worker.decode.drafters import make_drafter
from baton.worker.engine import build_engine
from rig import CONTEXT, generate, make, parameters, prompts_of, save_checkpoint

LENGTHS = range(3, 33, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("smaller"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def broken(checkpoint, tmp_path_factory):
    """Its logits are no numbers."""
    path = save_checkpoint(tmp_path_factory.mktemp("broken"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, path / "model.safetensors")
    return path


class Counting:
    """The drafter, and what became of its drafts."""

    def __init__(self, path, *, pages=400, budget=4096, slots=16):
        self.runner, cache = make(path, "cpu", torch.float32, num_pages=pages, slots=slots)
        size, groups = cache.page_size, len(cache.groups)
        sizes = {"pages": pages, "page_size": size, "groups": groups}
        self.drafter = ModelDrafter(self.runner, **sizes, context_length=CONTEXT, token_budget=budget)


def run(path, prompts, params, drafter=None, most=4, pages=400, **options):
    """Outputs, steps, and the cache."""
    runner, cache = make(path, "cpu", torch.float32, num_pages=pages)
    steps = []
    launch = runner.launch

    def counted(plan):
        steps.append(plan)
        return launch(plan)

    runner.launch = counted
    options = {"overlap": False, **options}
    outputs = generate(runner, cache, prompts, params, drafter=drafter, draft_tokens=most, **options)
    return outputs, steps


@pytest.fixture(scope="module")
def expected(checkpoint):
    return run(checkpoint, prompts_of(*LENGTHS), parameters())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_model_itself_is_always_right(checkpoint, expected, overlap):
    """Penalties, bias, seeds and all: it draws with the same noise."""
    drafter = Counting(checkpoint).drafter
    outputs, steps = run(checkpoint, prompts_of(*LENGTHS), parameters(), drafter, most=5, overlap=overlap)
    assert outputs == expected[0]
    # 24 tokens, of which 5 drafts and one more come in a step; a row has no drafts before its 4 least tokens.
    assert len(steps) < len(expected[1]) / 2
    if not overlap:
        assert len(steps) <= 4 + -(-20 // 6) + 2


@pytest.mark.parametrize("name", ["smaller", "broken"])
def test_another_model_changes_nothing(checkpoint, expected, request, name):
    drafter = Counting(request.getfixturevalue(name)).drafter
    outputs, steps = run(checkpoint, prompts_of(*LENGTHS), parameters(), drafter)
    assert outputs == expected[0]
    drafted = sum(len(row.drafts) for plan in steps for row in plan.rows)
    assert bool(drafted) == (name == "smaller")


@pytest.mark.parametrize("limits", [{"pages": 12}, {"budget": 7}, {"slots": 3}])
def test_little_room(checkpoint, expected, limits):
    """Sequences without pages or a slot, and those it has not caught up with, get no drafts."""
    outputs, steps = run(
        checkpoint, prompts_of(*LENGTHS), parameters(), Counting(checkpoint, **limits).drafter
    )
    assert outputs == expected[0]
    rows = [row for plan in steps for row in plan.rows if row.tokens is None]
    assert 0 < sum(bool(row.drafts) for row in rows) < len(rows)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    overlap=st.booleans(),
    pages=st.integers(10, 40),
    most=st.integers(1, 7),
    limits=st.sampled_from([{}, {"pages": 8}, {"budget": 5}, {"slots": 2}]),
)
def test_any_mix_of_arrivals_cancels_and_pressure(seed, overlap, pages, most, limits):
    """A model whose output betrays every wrong page drafts for itself: it is always right."""
    rng = random.Random(seed)
    room = {"pages": 400, "budget": 4096, "slots": 8} | limits
    runner = HashRunner(room["pages"], 4, room["slots"])
    sizes = {"pages": room["pages"], "page_size": 4, "groups": 1}
    drafter = ModelDrafter(runner, **sizes, context_length=190, token_budget=room["budget"])
    prefixes = [[rng.randrange(900) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    engine = Engine(
        pages=pages,
        budget=rng.choice([8, 16, 64]),
        overlap=overlap,
        output_margin=rng.choice([0, 4, 16]),
        context_length=min(200, pages * 4),
        drafter=drafter,
        draft_tokens=most,
    )
    accepted, cancelled = [], set()
    for key in range(rng.randrange(1, 16)):
        r = request(
            key,
            rng.choice(prefixes) + [rng.randrange(900) for _ in range(rng.randrange(0, 6))],
            max_tokens=rng.randrange(1, 25),
            seed=rng.randrange(99),
            n=rng.choice([1, 1, 1, 2, 3]),
            presence_penalty=rng.choice([0.0, 0.5]),
        )
        r.priority = rng.randrange(3)
        try:
            engine.scheduler.submit(r)
        except Refused:
            continue
        accepted.append(r)
        for _ in range(rng.randrange(4)):
            engine.turn()
        if rng.random() < 0.25 and (victim := rng.choice(accepted)).key in engine.scheduler.requests:
            engine.scheduler.close(victim)
            cancelled.add(victim.key)
    engine.run()
    check_outputs(engine, accepted, cancelled)
    # What was drafted was verified in full, but where a request was cancelled.
    if not cancelled:
        drafts = engine.scheduler.drafts
        assert drafts.accepted == drafts.drafted


def test_what_it_wrote_is_not_computed_again(checkpoint):
    """Of accepted drafts only the last one's keys and values are missing."""
    counting = Counting(checkpoint)
    launched = []
    launch = counting.runner.launch
    counting.runner.launch = lambda plan: launched.append(plan) or launch(plan)
    run(
        checkpoint, prompts_of(50), [SamplingParams(temperature=0.0, max_tokens=25)], counting.drafter, most=3
    )
    chunks = [len(row.tokens) for plan in launched for row in plan.rows if row.tokens is not None]
    assert chunks[0] == 51 and set(chunks[1:]) == {2}


def test_what_other_sequences_had_computed_is_not_computed_again(checkpoint):
    """Whole pages, of the same namespace; also once these have made room for others."""
    prompt, other = prompts_of(50, 20)

    def asked(drafter, tokens, namespace=""):
        """The rows of its first pass, and what it drafts."""
        plans = []
        launch = drafter._runner.launch
        drafter._runner.launch = lambda plan: plans.append(plan) or launch(plan)
        request = EngineRequest("a", tuple(tokens), SamplingParams(temperature=0.0), namespace=namespace)
        drafter.prepare([(request.sequences[0], 3)])
        drafter._runner.launch = launch
        return plans[0].rows[0], drafter.draft(request.sequences[0], 3)

    drafter = Counting(checkpoint, slots=2, pages=12).drafter
    for tokens, namespace, start in (
        (prompt, "", 0),
        (prompt, "", 48),
        (prompt[:48], "", 32),
        ([*prompt, *other], "", 48),
        (prompt, "own", 0),
        ([*prompt[:20], 1, *prompt[21:]], "", 16),
        ([*prompt, *other, 7], "", 64),
    ):
        row, drafts = asked(drafter, tokens, namespace)
        assert (row.start, list(row.tokens)) == (start, tokens[start:])
        assert drafts == asked(Counting(checkpoint).drafter, tokens)[1]
    drafter.slots.check()


def test_prompts_are_not_waited_for_but_where_others_write(checkpoint):
    """A device may still compute what `fill` has launched when its pages have made room for a copy."""
    drafter, reads = Counting(checkpoint, budget=32).drafter, []
    read = drafter._runner.read
    drafter._runner.read = lambda launched: reads.append(launched.number) or read(launched)
    prompt = prompts_of(50)[0]
    (sequence,) = EngineRequest("a", tuple(prompt), SamplingParams()).sequences
    drafter.fill([(sequence, 50)])
    assert drafter.filled(sequence) == (sequence.drafting, 50) and not reads
    for _ in range(2):
        kv = drafter.room(sequence, 50, 50)
        assert kv is not None and not kv.found and reads == [2], "the last of two chunks, once"
    drafter.keep(sequence, sequence.drafting, 50, 50)
    assert drafter.room(sequence, 50, 50).found == 3


def test_what_is_no_number_is_not_found_again(broken):
    drafter, starts = Counting(broken).drafter, []
    launch = drafter._runner.launch
    drafter._runner.launch = lambda plan: starts.append(plan.rows[0].start) or launch(plan)
    for _ in range(2):
        request = EngineRequest("a", tuple(prompts_of(50)[0]), SamplingParams(temperature=0.0))
        drafter.prepare([(request.sequences[0], 1)])
    assert starts == [0, 0]


def test_a_sequence_longer_than_it_knows(checkpoint):
    drafter = Counting(checkpoint).drafter
    drafter._context = 40
    sequence = EngineRequest("a", tuple(prompts_of(38)[0]), SamplingParams(temperature=0.0)).sequences[0]
    for tokens, count in ((38, 2), (39, 1), (40, 0), (41, 0)):
        drafter.prepare([(sequence, 5)])
        drafts = drafter.draft(sequence, 5)
        assert len(drafts) == count, tokens
        sequence.tokens.append(7)


CONFIG = DecodeConfig(
    model="demo", draft="demo", device="cpu", transports=("grpc",), kv_tokens=2048, max_rows=4
)


def test_a_worker_with_a_draft_model():
    engine = build_engine(CONFIG, new_incarnation())
    try:
        drafter = make_drafter(CONFIG, engine.drafter, engine.cache)
        assert isinstance(drafter, ModelDrafter)
        params = [SamplingParams(temperature=0.7, seed=4, max_tokens=20)]
        prompts, steps = [[30, 40, 50, 60]], []
        plain = generate(engine.runner, engine.cache, prompts, params, overlap=False)
        options = {"overlap": False, "drafter": drafter, "draft_tokens": 4}
        options["around"] = lambda: contextlib.nullcontext(steps.append(1))
        assert generate(engine.runner, engine.cache, prompts, params, **options) == plain
        assert len(steps) <= 6
    finally:
        engine.close()


def test_models_that_cannot_draft(checkpoint):
    for config, words in (
        (replace(CONFIG, draft=str(checkpoint)), "its vocabulary has 1000 tokens, the model's"),
        (replace(CONFIG, draft="./no/such/model"), "no such directory or file"),
    ):
        with pytest.raises((BatonError, CheckpointError), match=words):
            build_engine(config, new_incarnation())
