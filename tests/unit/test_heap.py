"""Memory that a step has freed stays for the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys, threading
import torch
from baton.worker.memory import MMAP_THRESHOLD, keep_freed_memory
ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**17)  # glibc's first value, which it otherwise adapts
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    parts = [torch.ones(6 * 2**20) for _ in range(4)]  # of 24 MiB
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def steps():
    for number in range(15):
        if number == 5:
            before = faults()
        step()
    print(faults() - before)
thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
def test_steps_allocate_without_page_faults():
    kept = faults("kept")
    assert kept < 1000 and faults("given back") > 2 * kept + 1000
