"""What a GPU's sampler knows of its slots; sampling itself needs one (tests/gpu/test_sampling.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.cuda_sampler import CudaSampler, edits
from baton.engine.plan import SlotInit
from baton.engine.sampler import Sampler
from baton.engine.sampler_ops import row_keys
from baton.engine.sampler_state import SlotStates
from baton.engine.sampling_params import SamplingParams

VOCAB = 50
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.0),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(logit_bias={3: 4.0, 49: -100.0}),
    SamplingParams(logit_bias={3: 4.0, 5: 1.0}, min_tokens=2, stop_token_ids=frozenset({5, 7})),
    SamplingParams(min_tokens=2, stop_token_ids=frozenset({1})),
    SamplingParams(min_tokens=2),
    SamplingParams(top_k=4),
]


def states() -> SlotStates:
    made = SlotStates(len(PARAMS), VOCAB, CPU)
    for slot, params in enumerate(PARAMS):
        made.init(SlotInit(slot, params, slot, (1, 2), (3,)))
    return made


def test_rows_that_change_and_how():
    """In the order of the batch, whatever slots it names; a copy of the logits so edited is what the sampler
    of a CPU makes of them."""
    slots = np.array([5, 3, 0, 4, 2, 6])
    change = edits(states(), slots)
    assert change.rows.tolist() == [0, 1, 3, 4]
    assert change.row_index.tolist() == [0, 1, -1, 2, 3, -1]
    assert len(set(change.at.tolist())) == len(change.at)
    logits = torch.randn(len(slots), VOCAB)
    changed = logits[torch.from_numpy(change.rows)].clone()
    changed.view(-1)[torch.from_numpy(change.at)] += torch.from_numpy(change.added)
    sampler = Sampler(len(PARAMS), VOCAB, CPU)
    for slot, params in enumerate(PARAMS):
        sampler.init(SlotInit(slot, params, slot, (1, 2), (3,)))
    want = logits.clone()
    assert sampler._modify(want, slots, np.zeros(0, np.int64))
    for place, row in enumerate(change.rows.tolist()):
        if not PARAMS[slots[row]].penalized:
            assert torch.equal(changed[place], want[row])


def test_stop_tokens_are_forbidden_until_enough_are_out():
    made = states()
    slots = np.array([5])
    assert edits(made, slots).at.tolist() == [1]
    assert edits(made, slots).added.tolist() == [-np.inf]
    made.output_length[5] = 2
    assert edits(made, slots).rows.size == 0


@pytest.mark.parametrize(("slots", "simple"), [([0, 1], True), ([0, 7], False), ([2], False), ([5], False)])
def test_what_a_temperature_tells_everything_about(slots, simple):
    sampler = CudaSampler(len(PARAMS), VOCAB, CPU)
    for slot, params in enumerate(PARAMS):
        sampler.init(SlotInit(slot, params, 40 + slot, (1, 2), (3,)))
    positions = np.arange(len(slots)) + 9
    found = sampler.simple(np.array(slots), positions)
    assert (found is not None) == simple
    if found is not None:
        assert found[0].tolist() == pytest.approx([PARAMS[slot].temperature for slot in slots])
        seeds = np.array([40 + slot for slot in slots], np.uint64)
        assert found[1].tolist() == row_keys(seeds, positions.astype(np.uint64)).tolist()
