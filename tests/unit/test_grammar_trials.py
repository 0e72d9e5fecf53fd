"""Grammars are tried in processes that may die: what the library does there ends no node."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.grammar.base import GrammarBusy, GrammarError, GrammarSpec
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.llguidance import LlguidanceBackend
from baton.grammar.trials import Trials, TrialVocabulary

VOCABULARY = TrialVocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], [256], [256], 257)
GOOD = GrammarSpec("regex", "[a-f]{2,9}")


@pytest.fixture
def make():
    made: list[Trials] = []

    def make(*command: str) -> Trials:
        trials = Trials(width=2, command=command) if command else Trials(width=2)
        made.append(trials)
        trials.load(VOCABULARY)
        return trials

    yield make
    for trials in made:
        trials.close()


HOSTILE = """
import os, signal, sys
import llguidance
from baton.grammar.trial_process import _load, serve

class Hostile:
    def __init__(self, vocabulary):
        self.backend = _load(vocabulary)

    def compile(self, spec):
        if spec.text == "library":  # llguidance 1.9.1 dies of it
            schema = '{"const": -9223372036854775808}'
            llguidance.LLMatcher(
                self.backend._tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema)
            )
        if spec.text == "loop":
            while True: pass
        if spec.text == "memory":
            bytearray(3 << 30)
        if spec.text == "abort":
            os.abort()
        if spec.text == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if spec.text == "exit":
            os._exit(3)

serve(list(map(int, sys.argv[1:])), Hostile)
"""


def backend():
    encode = lambda text: list(text.encode())  # noqa: E731
    return LlguidanceBackend(VOCABULARY.tokens, {256}, [256], 257, encode)


def family(trials: Trials) -> list[psutil.Process]:
    assert trials._processes is not None
    first = psutil.Process(trials._processes._process.pid)
    return [first, *first.children(recursive=True)]


def test_a_grammar_that_kills_the_library_fails_alone(make):
    trials = make(sys.executable, "-c", HOSTILE)
    compiler = GrammarCompiler(backend, check=trials.check)
    for _ in range(2):
        outcome = compiler.submit(GrammarSpec("regex", "library")).result(60)
        assert isinstance(outcome, GrammarError) and not isinstance(outcome, GrammarBusy)
        assert "SIGSEGV" in str(outcome) and "\n" not in str(outcome)
    assert not isinstance(compiler.submit(GOOD).result(60), GrammarError)


def test_what_is_refused_is_refused_in_the_same_words(make):
    outcomes = [
        GrammarCompiler(backend, check=check).submit(GrammarSpec("regex", "(")).result(60)
        for check in (None, make().check)
    ]
    assert isinstance(outcomes[0], GrammarError) and str(outcomes[0]) == str(outcomes[1])


def test_a_verdict_is_asked_for_once(make):
    trials = make()
    trials.check(GOOD)
    first = trials._processes
    trials._processes = None  # nobody left who could be asked
    trials.check(GOOD)
    with pytest.raises(GrammarBusy):
        trials.check(GrammarSpec("regex", "other"))
    trials._processes = first


@pytest.mark.parametrize(
    ("text", "error"),
    [("loop", "too long"), ("memory", "MemoryError"), ("abort", "SIGABRT"), ("exit", "exit code 3")],
)
def test_limits(make, monkeypatch, text, error):
    monkeypatch.setattr("baton.grammar.trials.TRIAL_SECONDS", 0.3)
    trials = make(sys.executable, "-c", HOSTILE)
    with pytest.raises(GrammarError, match=error) as raised:
        trials.check(GrammarSpec("regex", text))
    assert not isinstance(raised.value, GrammarBusy)
    for number in range(3):
        trials.check(GrammarSpec("regex", f"good {number}"))


def test_a_process_that_others_killed_says_nothing_about_a_grammar(make):
    trials = make(sys.executable, "-c", HOSTILE)
    with pytest.raises(GrammarBusy):
        trials.check(GrammarSpec("regex", "killed"))
    trials.check(GOOD)
    for process in family(trials)[1:]:
        process.send_signal(signal.SIGSEGV)  # nothing is tried
    for number in range(4):
        trials.check(GrammarSpec("regex", f"good {number}"))


def test_all_are_started_again_but_not_at_once(make, monkeypatch):
    trials = make()
    trials.check(GOOD)
    for process in family(trials):
        process.kill()
    with pytest.raises(GrammarBusy):
        trials.check(GrammarSpec("regex", "a"))
    with pytest.raises(GrammarBusy):
        trials.check(GrammarSpec("regex", "a"))
    monkeypatch.setattr("baton.grammar.trials.RESTART_SECONDS", 0.0)
    trials.check(GrammarSpec("regex", "a"))


PARENT = """
import sys, time
from baton.grammar.base import GrammarSpec
from baton.grammar.trials import Trials, TrialVocabulary

trials = Trials(width=2)
if sys.argv[1] == "loaded":
    trials.load(TrialVocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], [256], [256], 257))
    trials.check(GrammarSpec("regex", "a"))
print(trials._processes._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["new", "loaded"])
def test_they_end_with_the_node(tmp_path, state):
    """Also by SIGKILL. They are small until the first grammar, and no stop of the group ends them."""
    node = subprocess.Popen([sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE)
    try:
        first = psutil.Process(int(node.stdout.readline()))
        processes = [first, *first.children(recursive=True)]
        assert len(processes) == (1 if state == "new" else 3)
        if state == "new":
            assert first.memory_info().rss < 16 << 20
        else:
            for process in processes:
                process.terminate()
                assert Path(f"/proc/{process.pid}/maps").read_text().count("/dev/shm") == 0
            time.sleep(0.1)
            assert all(process.is_running() for process in processes)
    finally:
        node.kill()
        node.wait()
    assert not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.times
def test_a_first_use_comes_little_later(make):
    trials = make()
    plain, tried = GrammarCompiler(backend), GrammarCompiler(backend, check=trials.check)
    later = []
    for number in range(31):
        spec = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {f"k{number}": {}}}))
        seconds = []
        for compiler in (plain, tried):
            began = time.perf_counter()
            compiler.submit(spec).result(60)
            seconds.append(time.perf_counter() - began)
        later.append(seconds[1] - seconds[0])
    print(f"later by {1000 * statistics.median(later[1:]):.1f} ms, first {1000 * later[0]:.0f} ms")
    assert statistics.median(later[1:]) < 0.02
