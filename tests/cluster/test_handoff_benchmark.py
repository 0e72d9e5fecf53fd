"""benchmarks/handoff.py patches time stamps into real nodes: the patched functions still exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from process import ENVIRONMENT

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "handoff.py"


def test_all_events_of_a_hand_off_are_stamped_in_their_order(tmp_path):
    file = tmp_path / "times.json"
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--shape", "tiny", "--device", "cpu", "--kv-tokens", "4096"),
            *("--prompts", "100", "700", "--requests", "2", "--budget", "512", "--draft", "off", "head"),
            *("--json", str(file)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(each["draft"], each["prompt"]): each for each in json.loads(file.read_text())["results"]}
    assert set(found) == {("off", 100), ("off", 700), ("head", 100), ("head", 700)}
    assert {each["ranks"] for each in found.values()} == {"1 to 1"}
    for draft, times in [(key[0], times) for key, each in found.items() for times in each["milliseconds"]]:
        assert times["read"] == 0.0
        assert 0.0 < times["sent"] < times["received"] < times["launching"] < times["launched"] < 60_000
        # The pages are asked for before: nothing but a look into shared memory lies between.
        assert 0.0 < times["pull"] < times["pulled"] < times["launching"]
        # The first decode step carries the head's drafts.
        assert ("drafts" in times) == (draft == "head")
