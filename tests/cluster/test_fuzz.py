"""Bad bytes to every port: nothing crashes, hangs or leaks, and a good request is answered as before.

The corpus in tests/fuzz_corpus is sent whole; then fresh messages. A case that fails is written to the test's
folder; put it into the corpus. benchmarks/fuzz.py does this for longer.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fuzzing import Run, load, save, structured
from fuzzing.mutate import mutated

CORPUS = Path(__file__).parent.parent / "fuzz_corpus"
CALLS = 130
"""Of each kind; about four messages each."""


@pytest.fixture(scope="module")
def fuzzed(qwen3, tmp_path_factory, deployments) -> Iterator[Run]:
    with Run.deployment(tmp_path_factory.mktemp("fuzz"), qwen3[0]) as deployment:
        deployments.append(deployment)
        yield Run(deployment)


def clean(run: Run, folder: Path) -> None:
    for number, case in enumerate(run.report.failing):
        print("kept:", save(case, folder, f"failing-{number}"))
    wrong, run.report.wrong, run.report.failing = run.report.wrong, [], []
    assert not wrong


def test_corpus(fuzzed: Run, tmp_path: Path):
    cases = load(CORPUS)
    assert len(cases) > 20
    fuzzed.send(cases, Random(1))
    clean(fuzzed, tmp_path)


def test_fresh_messages(fuzzed: Run, tmp_path: Path):
    seed = int(os.environ.get("BATON_FUZZ_SEED", "0")) or secrets.randbits(32)
    print(f"BATON_FUZZ_SEED={seed}")
    rng = Random(seed)
    before = fuzzed.report.messages
    fuzzed.send(structured(CALLS, seed), rng)
    fuzzed.send(itertools.islice(mutated(rng), CALLS), rng)
    clean(fuzzed, tmp_path)
    assert fuzzed.report.messages - before > 500
