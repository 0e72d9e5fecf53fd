"""Drafts on a GPU: tokens and log-probabilities are those without, for all parameters."""

from __future__ import annotations

import pytest
import torch

from baton.engine.draft.oracle import OracleDrafter, prompt_digest
from baton.engine.scheduler import Scheduler
from rig import generate, make, parameters, prompts_of, save_checkpoint


def counted(monkeypatch):
    """Drafts that were verified, and those that were right, by all schedulers from now on."""
    found = [0, 0]
    commit = Scheduler._commit_decode

    def counting(self, record, row):
        found[0] += record.drafts
        found[1] += len(row.tokens) - 1
        commit(self, record, row)

    monkeypatch.setattr(Scheduler, "_commit_decode", counting)
    return found


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("invariant", torch.bfloat16), ("eager", torch.bfloat16), ("plain", torch.float32)]
)
def test_all_parameters(tmp_path, monkeypatch, kind, dtype, right):
    path = save_checkpoint(tmp_path)
    params, prompts = parameters(), prompts_of(*range(3, 60, 6))
    plain, drafted = {}, {}
    runner, cache = make(path, kind, dtype)
    tokens = generate(runner, cache, prompts, params, logprobs=plain)
    known = [(prompt_digest(prompt), output) for prompt, output in zip(prompts, tokens, strict=True)]
    found = counted(monkeypatch)
    for most in (1, 3, 7):
        runner, cache = make(path, kind, dtype)
        drafter = OracleDrafter(known, right)
        again = generate(runner, cache, prompts, params, drafter=drafter, draft_tokens=most, logprobs=drafted)
        if kind == "eager":  # other kernels for rows of several tokens: bits, and then texts, may differ
            same = sum(a == b for a, b in zip(again, tokens, strict=True))
            assert same >= len(tokens) // 2
        else:
            assert again == tokens
        if kind == "invariant":
            assert all(
                a is None or a.logprob == b.logprob
                for key, wanted in plain.items()
                for a, b in zip(wanted, drafted.pop(key), strict=True)
            )
        drafted.clear()
    assert found[0] > 100 and (found[1] > 0 if right else found[1] == 0)


def test_graphs(tmp_path, monkeypatch):
    """Rows with drafts are chunks of a graph; beside prompts too."""
    path = save_checkpoint(tmp_path)
    params, prompts = parameters()[:2] * 4, prompts_of(*range(3, 90, 11))
    runner, cache = make(path, "graphs", torch.bfloat16, draft_tokens=4)
    assert runner.chunk_graphs is not None
    run, shapes = runner.chunk_graphs.run, []
    monkeypatch.setattr(runner.chunk_graphs, "run", lambda *a: (shapes.append(a[0]), run(*a))[1])
    tokens = generate(runner, cache, prompts, params)
    known = [(prompt_digest(prompt), output) for prompt, output in zip(prompts, tokens, strict=True)]
    found = counted(monkeypatch)
    again = generate(
        runner, cache, prompts, params, drafter=OracleDrafter(known, 0.9), draft_tokens=4, budget=64
    )
    assert sum(a == b for a, b in zip(again, tokens, strict=True)) >= len(tokens) // 2
    assert found[1] > 50 and any(shape.few for shape in shapes)
