"""Models with drafts give the tokens and log-probabilities that they give without."""

from __future__ import annotations

import contextlib

import pytest
import torch

from baton.engine.draft.oracle import OracleDrafter, prompt_digest
from baton.engine.sampling_params import SamplingParams
from baton.grammar.base import GrammarSpec
from rig import VOCAB, generate, make, parameters, prompts_of, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("drafts"))


def sampled(checkpoint, prompts, params, **options):
    """Tokens, log-probabilities, and the number of steps."""
    runner, cache = make(checkpoint, "cpu", torch.float32)
    logprobs, launches = {}, []

    @contextlib.contextmanager
    def counted():
        launches.append(1)
        yield

    options = {"overlap": False, **options, "logprobs": logprobs, "around": counted}
    return generate(runner, cache, prompts, params, **options), logprobs, len(launches)


@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_parameters(checkpoint, right, most, overlap):
    params = parameters()
    prompts = prompts_of(*range(3, 60, 6))
    tokens, logprobs, without = sampled(checkpoint, prompts, params)
    known = [(prompt_digest(prompt), output) for prompt, output in zip(prompts, tokens, strict=True)]
    again, with_drafts, steps = sampled(
        checkpoint, prompts, params, drafter=OracleDrafter(known, right), draft_tokens=most, overlap=overlap
    )
    assert again == tokens
    assert steps < without + 2 * overlap if right else steps <= without + 2 * overlap
    if right == 1 and not overlap:
        assert steps <= 5 + -(-20 // (1 + most))  # a row has no drafts before its least tokens
    assert any(len(output) < 24 for output in tokens), "no stop token was sampled"
    for key, wanted in logprobs.items():
        for a, b in zip(wanted, with_drafts[key], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-4
                assert [token for token, _ in a.top] == [token for token, _ in b.top]


class Multiples:
    """A grammar: multiples of 3 and of 5 take turns."""

    def __init__(self):
        self.count = 0

    def matcher(self):
        return Multiples()

    def accept(self, tokens):
        for token in tokens:
            assert token % (5 if self.count % 2 else 3) == 0, "a token that the grammar forbids"
            self.count += 1

    def fill(self, words):
        words[:] = 0
        for token in range(0, VOCAB, 5 if self.count % 2 else 3):
            words.view("uint32")[token // 32] |= 1 << token % 32

    @classmethod
    def fill_all(cls, matchers, tokens, words):
        for row, (matcher, own) in enumerate(zip(matchers, tokens, strict=True)):
            matcher.accept(own)
            matcher.fill(words[row])
        return {}


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_grammars(checkpoint, right):
    """The mask of a position behind a draft is that of the drafted prefix."""
    spec = GrammarSpec("regex", "unused")
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, grammar=spec),
        SamplingParams(temperature=0.9, max_tokens=20, grammar=spec, seed=3),
        SamplingParams(temperature=0.9, max_tokens=20, seed=4),
    ]
    prompts, grammars = prompts_of(5, 20, 33), [Multiples(), Multiples(), None]
    tokens, *_ = sampled(checkpoint, prompts, params, grammars=grammars)
    known = [(prompt_digest(prompt), output) for prompt, output in zip(prompts, tokens, strict=True)]
    drafter = OracleDrafter(known, right)
    again, *_ = sampled(checkpoint, prompts, params, grammars=grammars, drafter=drafter, draft_tokens=5)
    assert again == tokens
    assert [token % 15 == 0 or token % 3 == 0 for token in tokens[0][::2]] == [True] * 10
