"""Heads and small models draft for a model of several ranks: on rank 0, which has whole hidden states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from eagle3_heads import HIDDEN, random_head, save_head

from baton.config import DecodeConfig
from baton.engine.draft.planner import DraftPlanner
from baton.rpc.address import new_incarnation
from baton.worker.decode.drafters import make_drafter
from baton.worker.engine import build_engine
from rig import VOCAB, generate, parameters, prompts_of, save_checkpoint


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4}
    model = save_checkpoint(folder / "model", **sizes)
    return {
        "": model,
        "eagle3": save_head(folder / "head", random_head("midlayer", VOCAB // 4, VOCAB), VOCAB),
    }


def outputs(config, monkeypatch):
    """Texts, the drafts that rows had, by their number, and how many were right."""
    engine, drafted = build_engine(config, new_incarnation()), [0, 0]
    verified = DraftPlanner.verified

    def counted(self, sequence, kind, count, right):
        drafted[0] += count
        drafted[1] += right
        verified(self, sequence, kind, count, right)

    monkeypatch.setattr(DraftPlanner, "verified", counted)
    guesses = []
    try:
        drafter = make_drafter(config, engine.drafter, engine.cache)
        if drafter is not None:
            draft = drafter.draft
            drafter.draft = lambda *own: guesses.append(tuple(draft(*own))) or guesses[-1]
        options = {"overlap": False, "drafter": drafter, "draft_tokens": 3 if drafter else 0}
        found = generate(engine.runner, engine.cache, prompts_of(5, 40, 77), parameters()[:3], **options)
        return found, guesses, drafted
    finally:
        monkeypatch.undo()
        engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_texts_and_drafts_are_those_of_one_rank(paths, monkeypatch, kind):
    sizes = {"kv_tokens": 2048, "max_rows": 4, "transports": ("grpc",), "threads": 1}
    config = DecodeConfig(model=str(paths[""]), device="cpu", dtype="float32", **sizes)
    drafting = replace(config, draft=str(paths["" if kind == "model" else kind]), draft_tokens=3)
    expected, _, _ = outputs(config, monkeypatch)
    alone, drafts, counts = outputs(drafting, monkeypatch)
    found, drafts_of_two, counts_of_two = outputs(replace(drafting, tp=2), monkeypatch)
    assert found == alone == expected
    assert drafts_of_two == drafts and counts_of_two == counts and counts[0] > 30
    assert kind != "model" or counts[1] > 0.9 * counts[0]
