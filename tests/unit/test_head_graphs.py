"""What a head's CUDA graphs hold, run as it is on a CPU: its drafts are those of passes one by one."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eagle3_heads import HIDDEN, LAYERS, random_head, save_head

from baton.attention.paged import PagedAttention
from baton.attention.step import ModelAttention
from baton.attention.torch_sdpa import TorchAttention
from baton.engine.draft.head_graphs import DRAFTS, HeadGraphs, LaunchedDrafts
from baton.engine.draft.heads import HeadDrafter
from baton.engine.draft.kv_slots import DraftKvSlots
from baton.engine.draft.planner import DraftPlanner
from baton.engine.draft.sampling import sample_by_temperature
from baton.engine.plan import SlotInit
from baton.engine.request import EngineRequest
from baton.engine.sampler import Sampler
from baton.engine.sampler_ops import row_keys
from baton.engine.sampling_params import SamplingParams
from baton.kvcache.kv_pool import PagePool, PoolLayout
from baton.models.eagle3 import load_eagle3
from baton.models.loader import load_model
from rig import CONTEXT, VOCAB, generate, make, parameters, prompts_of, save_checkpoint


class PlainPagedAttention(PagedAttention):
    """By page tables on the device, as kernels read them."""

    name = "plain"

    @staticmethod
    def available(device, dtype=None, head_dim=None):
        return None

    def plan(self, rows):
        pass

    def attend(self, layer, q, out, rows):
        keys, values = self._layers[layer]
        starts = rows.starts_of_all().tolist()
        for table, length, first, end in zip(
            rows.tables[self._group], rows.keys.tolist(), starts[:-1], starts[1:], strict=True
        ):
            assert end - first <= rows.longest
            k, v = (
                part[table.long()].flatten(0, 1)[:length].transpose(0, 1)[None] for part in (keys, values)
            )
            mask = torch.ones(end - first, length, dtype=torch.bool).tril(length - (end - first))
            own = q[first:end].transpose(0, 1)[None]
            found = F.scaled_dot_product_attention(own, k, v, attn_mask=mask, enable_gqa=True)
            out[first:end] = found[0].transpose(0, 1)


@pytest.fixture(autouse=True)
def failures_are_seen(monkeypatch):
    monkeypatch.setattr(DraftPlanner, "_guarded", lambda self: contextlib.nullcontext())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4}
    return save_checkpoint(tmp_path_factory.mktemp("target"), **sizes)


@pytest.fixture(scope="module")
def head(checkpoint, tmp_path_factory):
    path = save_head(tmp_path_factory.mktemp("head"), random_head("midlayer", VOCAB // 4, VOCAB), VOCAB)
    return load_eagle3(path, load_model(checkpoint, torch.float32, "cpu"))


def run(
    checkpoint,
    head,
    prompts,
    params,
    *,
    graphs,
    most,
    pages=400,
    slots=16,
    behind=True,
    known=(),
    right=0,
    counts=None,
    overlap=False,
):
    """Outputs, of each draft asked for what is known and what follows, and the shapes of the head's graphs.
    `behind`: it goes on behind steps that have not been read, and the host does not know its drafts. `known`:
    outputs, of which `right` tokens and then a wrong one take the place of the head's drafts. `counts`: of
    drafts that the host did not know."""
    pool = PagePool(PoolLayout.of(head.caches, 16, torch.float32), pages, torch.device("cpu"), spare=1)
    pool.raw.view(torch.float32).fill_(9.0)
    sizes = {"max_slots": slots, "vocab_size": VOCAB, "context_length": CONTEXT, "token_budget": 4096}
    drafter = HeadDrafter(head, pool, (PlainPagedAttention,) * 2, **sizes, graph_drafts=most * graphs)
    shapes, drafts = [], {}
    counts = Counter() if counts is None else counts
    if graphs:
        choose = drafter._graphs._run
        drafter._graphs._run = lambda shape, rows: (shapes.append(shape), choose(shape, rows))[1]
    draft = drafter.draft

    def kept(sequence, count):
        found = list(draft(sequence, count))
        named = [-1 - draft for draft in found if draft < 0]
        device = drafter.guesses if named else torch.zeros(0)
        drafts[sequence.request.key, len(sequence.tokens)] = device[named].tolist() if named else found
        if known:
            at = len(sequence.tokens) - len(sequence.request.prompt)
            own = [*known[sequence.request.key][at : at + right], sequence.tokens[-1] ^ 1][:count]
            if not named:
                return own
            own = own[: len(named)]
            with torch.inference_mode():
                device[named[: len(own)]] = torch.tensor(own, dtype=torch.int32)
            counts["named"] += len(own)
            found = found[: len(own)]
        return found

    drafter.draft = kept
    runner, cache = make(checkpoint, "cpu", torch.float32)
    runner._tap = LAYERS
    runner.drafter = drafter
    if not behind:
        drafter.follow = lambda launched: None
    options = {"overlap": overlap, "drafter": drafter, "draft_tokens": most, "budget": 40}
    return generate(runner, cache, prompts, params, **options), drafts, shapes


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("most", [3, 7])
def test_drafts_are_those_of_single_passes(checkpoint, head, most, behind):
    """Greedy and by temperature; prompts in several chunks, rows that end in the middle of a page, rows of
    different lengths and number."""
    prompts = prompts_of(5, 37, 16, 60, 3)
    params = [SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=9 + 3 * i) for i in range(5)]
    plain = run(checkpoint, head, prompts, params, graphs=False, most=most)
    found = run(checkpoint, head, prompts, params, graphs=True, most=most, behind=behind)
    assert found[0] == plain[0]
    assert found[1] == plain[1] and sum(map(len, found[1].values())) > 100
    assert len(found[2]) > 20 and {shape.rows for shape in found[2]} >= {1, 4}


@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafts_behind_right_ones_are_those_of_single_passes(checkpoint, head, right, monkeypatch):
    """Whatever number of drafts turns out to be right, and where the row ends in a page."""
    behind, begin = [], HeadGraphs.run_behind
    monkeypatch.setattr(
        HeadGraphs, "run_behind", lambda self, *args: (behind.append(len(args[1])), begin(self, *args))[1]
    )
    prompts = prompts_of(5, 37, 16, 60, 3)
    params = [SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=40) for i in range(5)]
    known = run(checkpoint, head, prompts, params, graphs=False, most=1)[0]
    options = {"most": 3, "known": known, "right": right}
    plain = run(checkpoint, head, prompts, params, graphs=False, **options)
    found = run(checkpoint, head, prompts, params, graphs=True, **options)
    assert found[0] == plain[0] == known
    assert found[1] == plain[1] and sum(map(len, found[1].values())) > 100
    assert len(behind) > 8 and behind.count(5) > 4


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_follows_a_stop_token_that_was_a_right_draft(checkpoint, head, overlap):
    """The host does not know that it is one of a row's drafts."""
    prompts = prompts_of(5, 37, 16, 60, 3)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40) for i in range(5)]
    known = run(checkpoint, head, prompts, params, graphs=False, most=1)[0]
    ends = [output[20 + 3 * i] for i, output in enumerate(known)]
    params = [replace(each, stop_token_ids=frozenset({end})) for each, end in zip(params, ends, strict=True)]
    counts = Counter()
    options = {"graphs": True, "most": 3, "known": known, "right": 3, "counts": counts, "overlap": overlap}
    found = run(checkpoint, head, prompts, params, **options)[0]
    assert found == [output[: output.index(end) + 1] for output, end in zip(known, ends, strict=True)]
    assert counts["named"] > 20


def test_drafts_that_are_no_numbers_change_nothing_and_are_not_gone_on_from(
    checkpoint, tmp_path, monkeypatch
):
    """The first behind a prompt, and those behind drafts: the host sees it a step later."""
    tensors = random_head("midlayer", VOCAB // 4, VOCAB)
    tensors["fc.weight"].fill_(torch.nan)
    broken = load_eagle3(
        save_head(tmp_path / "head", tensors, VOCAB), load_model(checkpoint, torch.float32, "cpu")
    )
    prompts, params = prompts_of(5, 37), [SamplingParams(temperature=0.0, max_tokens=9)] * 2
    runner, cache = make(checkpoint, "cpu", torch.float32)
    expected = generate(runner, cache, prompts, params, overlap=False)
    drop, dropped = DraftKvSlots.drop, []
    monkeypatch.setattr(
        DraftKvSlots,
        "drop",
        lambda self, kv, damaged=False: (dropped.append(damaged), drop(self, kv, damaged)),
    )
    outputs, drafts, _ = run(checkpoint, broken, prompts, params, graphs=True, most=3)
    assert outputs == expected and any(drafts.values())
    assert dropped.count(True) >= 2


@pytest.mark.parametrize("attention", [PlainPagedAttention, TorchAttention])
def test_what_is_filled_is_what_passes_write(head, attention, monkeypatch):
    """Keys and values of prompts in several chunks, of any length, beside each other."""
    written = []
    for fills in (True, False):
        pool = PagePool(PoolLayout.of(head.caches, 16, torch.float32), 32, torch.device("cpu"), spare=1)
        sizes = {"max_slots": 4, "vocab_size": VOCAB, "context_length": CONTEXT, "token_budget": 48}
        drafter = HeadDrafter(head, pool, (attention,) * 2, **sizes)
        sequences = []
        for seed, length in enumerate((2, 40, 75)):
            prompt = prompts_of(length, seed=seed)[0]
            sequences += EngineRequest(seed, tuple(prompt), SamplingParams()).sequences
            hidden = torch.randn(length, head.values, generator=torch.Generator().manual_seed(seed))
            drafter.observe(sequences[-1], 0, hidden)
        if fills:
            with monkeypatch.context() as patched:
                patched.setattr(head, "forward", None)  # what it computes beside them is not wanted
                drafter.fill([(sequence, len(sequence.tokens)) for sequence in sequences])
        for _ in range(0 if fills else 3):
            drafter.prepare([(sequence, 1) for sequence in sequences])
        for sequence in sequences:
            kv, entries = drafter.filled(sequence)
            assert entries == len(sequence.tokens) - 1
            table = torch.tensor(kv.tables[0])
            parts = [part[table].flatten(0, 1)[:entries] for part in pool.groups[0].layer(0)]
            written.append(torch.stack(parts))
    for filled, passed in zip(written[:3], written[3:], strict=True):
        torch.testing.assert_close(filled, passed)


def test_copies_wait_for_all_drafts_that_are_under_way(head):
    """They may go where these write."""

    class Event:
        def record(self):
            recorded.append(self)

        def synchronize(self):
            waited.append(self)

    recorded = []
    pool = PagePool(PoolLayout.of(head.caches, 16, torch.float32), 8, torch.device("cpu"), spare=1)
    sizes = {"max_slots": 2, "vocab_size": VOCAB, "context_length": CONTEXT, "token_budget": 64}
    drafter, waited = HeadDrafter(head, pool, (PlainPagedAttention,) * 2, **sizes), []
    tokens = torch.zeros(2, dtype=torch.int32)
    under_way = [LaunchedDrafts(torch.zeros(2, 1, 2), 1, Event(), tokens) for _ in range(3)]
    drafter._launched = under_way[0]
    for launched in under_way[1:]:
        drafter._name(launched, [])
    drafter._passes._written = Event()
    (sequence,) = EngineRequest("a", (1, 2, 3), SamplingParams()).sequences
    drafter.observe(sequence, 0, torch.zeros(3, head.values))
    drafter.fill([(sequence, 3)])
    assert recorded == [drafter._passes._written]
    assert drafter.room(sequence, 2, 3) is not None
    assert waited == [*(launched.done for launched in under_way), *recorded]


@pytest.mark.parametrize("limits", [{}, {"pages": 7}, {"slots": 3}, {"overlap": True}])
def test_texts_are_those_without(checkpoint, head, limits):
    prompts, params = prompts_of(*range(3, 33, 3)), parameters()
    runner, cache = make(checkpoint, "cpu", torch.float32)
    expected = generate(runner, cache, prompts, params, overlap=False)
    outputs, drafts, shapes = run(checkpoint, head, prompts, params, graphs=True, most=5, **limits)
    assert outputs == expected
    assert shapes and any(drafts.values())


def test_shapes_have_room(head):
    pool = PagePool(PoolLayout.of(head.caches, 16, torch.float32), 8, torch.device("cpu"), spare=1)
    attention = ModelAttention(pool, head.heads, head.attention_options, *(PlainPagedAttention,) * 2)
    graphs = HeadGraphs(head, attention, VOCAB, CONTEXT, DRAFTS[-1], 48)
    for rows in range(1, 49):
        for drafts in range(1, 8):
            shape = graphs.shape(rows, drafts)
            assert shape is not None and shape.rows >= rows and shape.drafts >= drafts
            assert shape.rows < 2 * rows and shape.drafts <= drafts + 1
    assert graphs.shape(65, 1) is None and graphs.shape(1, 8) is None
    # Longer rows of drafts than there are shapes for run without.
    assert HeadGraphs(head, attention, VOCAB, CONTEXT, DRAFTS[-1] + 1, 48).shapes == graphs.shapes


def test_tokens_by_temperature_are_the_samplers():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 5000, generator=generator) * 4
    sampler = Sampler(64, 5000, torch.device("cpu"))
    temperatures = [0.0, 0.3, 1.0, 1.7] * 16
    for slot, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature)
        sampler.init(SlotInit(slot, params, 1000 + slot, (), ()))
    slots, positions = np.arange(64), np.arange(64) * 3 + 5
    expected = sampler.sample(logits.clone(), slots, positions)
    result = torch.empty(64, 2, dtype=torch.int32)
    keys = row_keys(np.arange(1000, 1064, dtype=np.uint64), positions.astype(np.uint64))
    sample_by_temperature(logits, torch.tensor(temperatures), torch.from_numpy(keys), result)
    assert result[:, 0].tolist() == expected.tokens.tolist()
    assert torch.equal(result[:, 1].contiguous().view(torch.float32), logits.amax(-1))
