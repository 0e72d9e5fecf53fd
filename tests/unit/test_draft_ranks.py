"""Heads and small models draft for a model of several ranks: on rank 0, which has whole hidden states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_medusa
from eagle3_heads import HIDDEN, random_head, save_head
from mtp_layers import save_with_mtp

from baton.config import DecodeConfig
from baton.engine.draft.planner import DraftPlanner
from baton.rpc.address import new_incarnation
from baton.worker.decode.drafters import make_drafter
from baton.worker.engine import build_engine
from rig import VOCAB, generate, parameters, prompts_of, save_checkpoint

SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4}
MTP = {"mtp of experts": "glm4-moe", "mtp of states": "qwen3.5", "mtp of latents": "deepseek-v3"}


@pytest.fixture(params=["eagle3", "model", "medusa", *MTP])
def kind(request):
    return request.param


@pytest.fixture
def paths(kind, tmp_path):
    """The model, and what drafts for it."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    if kind in MTP:
        save_with_mtp(MTP[kind], model)
        return model, "mtp"
    if kind == "medusa":
        test_medusa.save_heads(draft, listed=True)
        return save_checkpoint(model), draft
    save_checkpoint(model, **SIZES)
    if kind == "model":
        return model, model
    return model, save_head(draft, random_head("midlayer", VOCAB // 4, VOCAB), VOCAB)


def outputs(config, monkeypatch):
    """Texts, all guesses, the drafts that rows had, by their number, and how many were right."""
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
        vocabulary = engine.model_info.vocab_size
        prompts = [[token % vocabulary for token in prompt] for prompt in prompts_of(5, 40, 77)]
        found = generate(engine.runner, engine.cache, prompts, parameters()[:3], **options)
        return found, guesses, drafted
    finally:
        monkeypatch.undo()
        engine.close()


@pytest.mark.thorough
def test_texts_and_drafts_are_those_of_one_rank(kind, paths, monkeypatch):
    sizes = {"kv_tokens": 2048, "max_rows": 4, "transports": ("grpc",), "threads": 1}
    config = DecodeConfig(model=str(paths[0]), device="cpu", dtype="float32", **sizes)
    drafting = replace(config, draft=str(paths[1]), draft_tokens=3)
    expected, _, _ = outputs(config, monkeypatch)
    alone, drafts, counts = outputs(drafting, monkeypatch)
    found, drafts_of_two, counts_of_two = outputs(replace(drafting, tp=2), monkeypatch)
    assert found == alone == expected
    assert drafts_of_two == drafts and counts_of_two == counts and counts[0] > 30
    assert kind != "model" or counts[1] > 0.9 * counts[0]
