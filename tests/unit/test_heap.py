"""Memory that a step has freed stays for the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
import torch
from baton.worker.heap import MMAP_THRESHOLD, keep_freed_memory
ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**17)  # glibc's first value, which it otherwise adapts
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    parts = [torch.ones(6 * 2**20) for _ in range(4)]  # of 24 MiB
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for number in range(15):
    if number == 5:
        before = faults()
    step()
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
def test_steps_allocate_without_page_faults():
    assert faults("kept") < 1000
    assert faults("given back") > 10 * 1000  # else nothing is gained
