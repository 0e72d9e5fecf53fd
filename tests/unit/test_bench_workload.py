"""Workloads and arrival times of `baton bench`."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.bench.workload import TokenRange, Workload, poisson_arrivals

OPEN = Workload(prompt_tokens=TokenRange(4, 9), output_tokens=TokenRange(3, 3), rate=50.0, seconds=4.0)
NANO = Workload(
    prompt_tokens=TokenRange(100, 1024),
    output_tokens=TokenRange(100, 1024),
    requests=256,
    temperature=0.6,
    nano=True,
)


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = poisson_arrivals(200.0, 100.0, (1,))
    assert times == sorted(times) and times[0] > 0.0 and times[-1] < 100.0
    assert len(times) / 100.0 == pytest.approx(200.0, rel=0.03)
    gaps = [b - a for a, b in pairwise(times)]
    # Exponential: deviation equals mean, and 1/e of the gaps are longer than it.
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.05)
    assert sum(gap > 1 / 200.0 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)
    # Counts of disjoint seconds vary as much as they are large.
    counts = [sum(second <= at < second + 1 for at in times) for second in range(100)]
    assert statistics.variance(counts) == pytest.approx(200.0, rel=0.4)


def test_arrivals_depend_on_the_seed_alone():
    assert poisson_arrivals(5.0, 10.0, (3,)) == poisson_arrivals(5.0, 10.0, (3,))
    assert poisson_arrivals(5.0, 10.0, (3,)) != poisson_arrivals(5.0, 10.0, (4,))
    longer = poisson_arrivals(5.0, 20.0, (3,))
    assert longer[: len(poisson_arrivals(5.0, 10.0, (3,)))] == poisson_arrivals(5.0, 10.0, (3,))


def test_jobs_are_the_same_for_all_who_make_them():
    assert replace(OPEN).jobs(100, 64) == OPEN.jobs(100, 64)
    jobs = OPEN.jobs(100, 64)
    assert [job.at for job in jobs] == OPEN.arrivals()
    assert {len(job.prompt) for job in jobs} == set(range(4, 10))
    assert all(0 <= token < 100 for job in jobs for token in job.prompt)
    assert {job.output_tokens for job in jobs} == {3}


def test_runs_and_warm_up_share_no_prompt():
    long = replace(OPEN, prompt_tokens=TokenRange(32, 32))
    seen = [tuple(job.prompt) for run in range(3) for job in replace(long, run=run).jobs(1000, 64)]
    seen += [tuple(job.prompt) for job in long.warm_up(20, 1000, 64)]
    assert len(set(seen)) == len(seen)
    assert replace(long, run=1).arrivals() != long.arrivals()


def test_a_shared_prefix_is_shared_by_all_runs():
    work = replace(OPEN, prompt_tokens=TokenRange(20, 30), shared_prefix=16)
    prompts = [job.prompt for run in range(2) for job in replace(work, run=run).jobs(1000, 64)]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:20]) for prompt in prompts}) > len(prompts) // 2
    assert all(20 <= len(prompt) <= 30 for prompt in prompts)


def test_the_workload_of_nano_vllm():
    jobs = NANO.jobs(151936, 40960)
    assert sum(len(job.prompt) for job in jobs) == 142_827
    assert sum(job.output_tokens for job in jobs) == 133_966
    small = NANO.jobs(4096, 2048)
    assert [len(job.prompt) for job in small] == [len(job.prompt) for job in jobs]
    assert max(token for job in small for token in job.prompt) < 4096


def test_what_a_context_does_not_hold_is_cut():
    jobs = NANO.jobs(4096, 512)
    assert all(
        len(job.prompt) + job.output_tokens <= 512 and job.prompt and job.output_tokens for job in jobs
    )
    assert max(job.output_tokens for job in jobs) <= 512 - 100


def test_warm_up_fits_and_is_short():
    jobs = NANO.warm_up(5, 4096, 256)
    assert len(jobs) == 5 and all(len(job.prompt) + job.output_tokens <= 256 for job in jobs)


@pytest.mark.parametrize("text", ["", "x", "0", "5-3", "-4", "1-", "1.5"])
def test_ranges_that_are_none(text):
    with pytest.raises(ValueError, match=r"number of tokens|must be 1"):
        TokenRange.parse(text)


def test_ranges():
    assert TokenRange.parse("128") == TokenRange(128, 128) and str(TokenRange.parse("128")) == "128"
    assert (
        TokenRange.parse("100-1024") == TokenRange(100, 1024)
        and str(TokenRange.parse("100-1024")) == "100-1024"
    )


CHATS = replace(
    OPEN, kind="conversation", rate=40.0, prompt_tokens=TokenRange(20, 30), shared_prefix=8, think=0.5
)


def test_conversations_grow_until_they_end_or_fill_the_context():
    jobs = CHATS.jobs(1000, 120)
    assert jobs == replace(CHATS).jobs(1000, 120)
    threads = {job.thread: [other for other in jobs if other.thread == job.thread] for job in jobs}
    assert len({tuple(thread[0].prompt[:8]) for thread in threads.values()}) == 1
    assert len({tuple(job.prompt[-20:]) for job in jobs}) == len(jobs)
    for thread in threads.values():
        assert [job.continues for job in thread] == [False] + [True] * (len(thread) - 1)
        assert sum(len(job.prompt) + job.output_tokens for job in thread) <= 120
        assert all(job.pause > 0 for job in thread)
    # 8 + 25 + 3 tokens, then 28 a turn: the fourth does not fit.
    assert 2 <= max(len(thread) for thread in threads.values()) <= 4
    plenty = CHATS.jobs(1000, 10_000)
    assert {sum(job.thread == one for job in plenty) for one in threads} == set(range(3, 10))
    # As many requests as the rate says, give or take.
    assert len(plenty) == pytest.approx(40.0 * 4.0, rel=0.4)
    pauses = [job.pause for job in plenty if job.continues]
    assert statistics.fmean(pauses) == pytest.approx(0.5, rel=0.4)


def test_questions_are_spread_over_the_documents():
    work = replace(
        OPEN,
        kind="documents",
        documents=4,
        prompt_tokens=TokenRange(50, 60),
        question_tokens=TokenRange(5, 9),
    )
    jobs = work.jobs(1000, 100)
    by_document = Counter(tuple(job.prompt[:50]) for job in jobs)
    assert len(by_document) == 4 and min(by_document.values()) > len(jobs) / 8
    assert len({tuple(job.prompt) for job in jobs}) == len(jobs)
    assert {job.prompt[0] for job in replace(work, run=1).jobs(1000, 100)} != {job.prompt[0] for job in jobs}
    assert max(len(job.prompt) + job.output_tokens for job in work.jobs(1000, 58)) <= 58
    assert work.longest == 60 + 9 + 3 and CHATS.longest == 8 + 30 + 3
    assert replace(CHATS, opening=50).longest == 8 + 50 + 30 + 3


def test_documents_have_a_shared_prefix_too():
    work = replace(OPEN, kind="documents", shared_prefix=16, question_tokens=TokenRange(5, 5))
    jobs = work.jobs(1000, 100)
    assert len({tuple(job.prompt[:16]) for job in jobs}) == 1 < len({job.prompt[16] for job in jobs})
    assert max(len(job.prompt) + job.output_tokens for job in jobs) == work.longest == 16 + 9 + 5 + 3


def test_conversations_open_with_what_they_are_about():
    jobs = replace(CHATS, opening=50).jobs(1000, 10_000)
    assert all(8 + 50 + 20 <= len(job.prompt) <= 8 + 50 + 30 for job in jobs if not job.continues)
    assert all(20 <= len(job.prompt) <= 30 for job in jobs if job.continues)
