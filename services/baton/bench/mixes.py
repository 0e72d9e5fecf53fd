"""Workloads whose prompts share beginnings, as those of people do: conversations, and questions on documents.

They send no session: what their prompts share, only the deployment's caches and its routing can make use of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.bench.jobs import Job

if TYPE_CHECKING:
    from baton.bench.workload import Workload

KINDS = ("random", "conversation", "documents")


def conversation_jobs(
    work: Workload, times: list[float], vocabulary: int, context: int, seed: tuple[int, ...]
) -> list[Job]:
    """A conversation begins at each of the times. All begin with the same `shared_prefix` tokens (a system
    prompt); each turn adds `prompt_tokens` to what has been said before, answers included, after a pause of
    `think` seconds on average. One ends after its `turns`, or before the first that the context does not
    hold."""
    prefix = _tokens(np.random.default_rng((work.seed, work.shared_prefix)), vocabulary, work.shared_prefix)
    jobs: list[Job] = []
    for thread, at in enumerate(times):
        draw = np.random.default_rng((*seed, thread))
        said = 0
        for turn in range(work.turns.draw(draw)):
            new = _tokens(draw, vocabulary, work.prompt_tokens.draw(draw))
            prompt = new if turn else [*prefix, *new]
            output = work.output_tokens.draw(draw)
            pause = float(draw.exponential(work.think)) if turn else 0.0
            said += len(prompt) + output
            if said > context:
                break
            jobs.append(Job(at, prompt, output, len(jobs), thread, turn > 0, pause))
    return jobs


def documents_jobs(
    work: Workload, times: list[float], vocabulary: int, context: int, seed: tuple[int, ...]
) -> list[Job]:
    """A question at each of the times: one of `documents` documents of `prompt_tokens` each, every one asked
    as often as any other on average, and `question_tokens` behind it."""
    made = [np.random.default_rng((*seed, 0, number)) for number in range(work.documents)]
    documents = [_tokens(draw, vocabulary, work.prompt_tokens.draw(draw)) for draw in made]
    jobs = []
    for index, at in enumerate(times):
        draw = np.random.default_rng((*seed, 1, index))
        document = documents[int(draw.integers(work.documents))]
        question = _tokens(draw, vocabulary, work.question_tokens.draw(draw))
        prompt = [*document, *question][: max(1, context - work.output_tokens.high)]
        jobs.append(Job(at, prompt, work.output_tokens.draw(draw), index, index))
    return jobs


def _tokens(draw: np.random.Generator, vocabulary: int, count: int) -> list[int]:
    found: list[int] = draw.integers(vocabulary, size=count).tolist()
    return found
