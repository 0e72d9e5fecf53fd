"""Hidden states of layers: of those that a model has, for whoever names them."""

from __future__ import annotations

import json

import pytest
import torch
from eagle3_heads import random_head, save_head
from random_checkpoints import save_checkpoint
from test_recurrent_families import VARIANTS

from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.models.config import ModelError
from baton.models.eagle3 import load_eagle3
from baton.models.loader import load_model
from rig import make
from rig import save_checkpoint as save_llama


def hidden_of(path, *wanted, tap=()):
    """Of each row of a step, which name these layers, what it gets."""
    runner, cache = make(path, "cpu", torch.float32)
    groups = len(cache.groups)
    runner._tap = tap
    rows, inits = [], []
    for slot, layers in enumerate(wanted):
        tokens, pages = tuple(range(3, 11)), tuple((slot * groups + group,) for group in range(groups))
        rows.append(PlanRow(slot, tokens, 0, pages, (slot,), hidden_layers=layers))
        inits.append(SlotInit(slot, SamplingParams(temperature=0.0), 1, (), ()))
    result = runner.read(runner.launch(StepPlan(1, tuple(rows), tuple(inits))))
    return [row.hidden for row in result.rows]


@pytest.mark.parametrize("tap", [(), (0, 1)])
def test_a_layer_that_the_model_lacks_takes_nothing_from_others(tmp_path, tap):
    path = save_llama(tmp_path / "model")
    (alone,) = hidden_of(path, (1,))
    assert alone.shape == (8, 256)
    found = hidden_of(path, (1,), (1, 99), (), tap=tap)
    assert torch.allclose(found[0], alone, atol=1e-5) and found[1] is None
    assert (found[2] is None) == (not tap)


@pytest.mark.parametrize("variant", ["falcon-h1", "nemotron-h"])
def test_models_whose_layers_are_not_their_checkpoints(tmp_path, variant):
    """No depth in them is the one that a head was trained with."""
    save_checkpoint(variant, tmp_path / "model", variants=VARIANTS)
    model = load_model(tmp_path / "model", torch.float32, "cpu")
    path = save_head(tmp_path / "head", random_head("midlayer", 64, 64), 64)
    config = json.loads((path / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="leave out --draft"):
        load_eagle3(path, model)
    assert hidden_of(tmp_path / "model", (1,)) == [None]
    assert hidden_of(tmp_path / "model", (0, model.config.num_layers)) == [None]
