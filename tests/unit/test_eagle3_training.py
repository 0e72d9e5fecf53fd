"""The head that tools/train_eagle3.py trains computes in its unrolled steps what drafting computes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eagle3_heads import DIM, HEADS, HIDDEN, INNER, KV_HEADS, PlainHead, random_head
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import train_eagle3
from draft_prompts import HELD_OUT, KINDS, TRAINING, functions, prompts
from eagle3_head import Head

VOCAB, TOKENS, STEPS = 96, 12, 4
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_theta": 10000.0},
    vocab_size=VOCAB,
    max_position_embeddings=256,
)


def made() -> tuple[Head, dict[str, torch.Tensor], torch.Tensor]:
    """A head with random weights, these, and the embedding."""
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    tensors = random_head("midlayer", VOCAB // 4, VOCAB)
    head = Head(CONFIG, embedding, INNER, torch.arange(VOCAB // 4) + tensors["d2t"])
    head.load_state_dict({name: tensors[name] for name in head.state_dict()})
    return head, tensors, embedding


@torch.no_grad()
def test_each_unrolled_step_is_a_draft_behind_each_place():
    head, tensors, embedding = made()
    plain = PlainHead(tensors, embedding, "midlayer")
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(1, TOKENS, 3 * HIDDEN, generator=generator)
    ids = torch.randint(VOCAB, (1, TOKENS), generator=generator)
    found = list(head(taps, ids, STEPS))
    for place in range(TOKENS - STEPS - 1):
        hidden, following = plain.enter(taps[0, : place + 1]), ids[0, 1 : place + 2]
        for step in range(STEPS):
            out = plain.forward(following, hidden)
            torch.testing.assert_close(found[step][0, place], out[-1], atol=1e-4, rtol=1e-4)
            hidden = torch.cat((hidden, out[-1:]))
            following = ids[0, 1 : place + 3 + step]


def test_a_saved_head_has_the_formats_tensors(tmp_path):
    head, tensors, _ = made()
    head.save(tmp_path, (1, 2, 3))
    saved = {
        name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert saved.keys() == tensors.keys()
    assert torch.equal(saved["d2t"], tensors["d2t"])
    assert torch.equal(saved["t2d"], tensors["t2d"])
    torch.testing.assert_close(saved["fc.weight"].float(), tensors["fc.weight"], atol=1e-2, rtol=1e-2)


@pytest.mark.thorough
def test_held_out_prompts_are_none_of_training():
    for kind in KINDS:
        some = [
            {next(made) for _ in range(300)} for made in (prompts(kind, w, 1) for w in (TRAINING, HELD_OUT))
        ]
        assert len(some[0]) > 150 and not some[0] & some[1]
    assert not set(TRAINING.topics) & set(HELD_OUT.topics)
    assert not set(TRAINING.chat) & set(HELD_OUT.chat)
    assert not set(TRAINING.texts) & set(HELD_OUT.texts)
    assert functions(False) and functions(True)


def test_answers_that_a_call_was_stopped_in_saving_are_those_before(tmp_path, monkeypatch):
    answers, path = [train_eagle3.Answer([1, 2], [3])], tmp_path / "answers.safetensors"
    parts = {"training": answers, "held-out": answers}
    train_eagle3.save_answers(path, parts)

    def stopped(tensors, file):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(train_eagle3, "save_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_eagle3.save_answers(path, parts)
    assert train_eagle3.load_answers(path) == parts
