"""Rejected drafts leave no trace in the states of recurrent layers."""

from __future__ import annotations

import pytest
import torch
from test_recurrent_families import save

from baton.engine.draft.oracle import OracleDrafter, prompt_digest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.layers.recurrent import RecurrentModule
from rig import generate, make

PAGE = 16
LENGTHS = (1, 15, 16, 17)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafts")
    save("qwen3.5", path)
    return path


def outputs(checkpoint, drafter=None, most=0, overlap=False):
    """Of greedy and of sampled rows side by side."""
    runner, cache = make(checkpoint, "cpu", torch.float32, page_size=PAGE, draft_tokens=most)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in LENGTHS]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=30 + i) for i in range(len(LENGTHS))
    ]
    options = {"budget": 64, "overlap": overlap, "drafter": drafter, "draft_tokens": most}
    return prompts, generate(runner, cache, prompts, params, **options)


@pytest.fixture(scope="module")
def without(checkpoint):
    return outputs(checkpoint)


def oracle(without, right):
    known = [(prompt_digest(prompt), output) for prompt, output in zip(*without, strict=True)]
    return OracleDrafter(known, right)


@pytest.mark.parametrize(
    ("right", "most", "overlap"), [(0.0, 3, False), (0.7, 1, True), (0.7, 7, False), (1.0, 3, False)]
)
def test_outputs_are_those_without_drafts(checkpoint, without, right, most, overlap):
    assert outputs(checkpoint, oracle(without, right), most, overlap) == without


@pytest.mark.parametrize("stays", [0, 1])
def test_an_update_that_stays_is_found(checkpoint, without, stays, monkeypatch):
    """Of a rejected draft, in the matrices of the delta rule, or in the convolution's window."""
    write = RecurrentModule._write

    def wrong(self, run, owned, after):
        write(self, run, owned, after)
        if run.writes is None:
            owned[stays][1][0].index_copy_(0, run.reads, after[stays])

    monkeypatch.setattr(RecurrentModule, "_write", wrong)
    assert outputs(checkpoint, oracle(without, 0.0), 3) != without


def test_right_drafts_that_are_forgotten_are_found(checkpoint, without, monkeypatch):
    commit = Scheduler._commit_decode

    def wrong(scheduler, record, row):
        commit(scheduler, record, row)
        record.sequence.replay = 0

    monkeypatch.setattr(Scheduler, "_commit_decode", wrong)
    assert outputs(checkpoint, oracle(without, 1.0), 3) != without
