"""How many pages a pool on a GPU gets, also where several processes share the GPU."""

from __future__ import annotations

import pytest
import torch

from baton.kvcache.pool import KvLayout
from baton.rpc.errors import BatonError
from baton.worker.memory import fitting

GIB = 2**30
LAYOUT = KvLayout(32, 8, 128, 64, torch.bfloat16)
"""Pages of 8 MiB: 128 to a GiB."""


def pages(own: float, free: float, fraction: float, total: float = 100) -> int:
    return fitting(int(own * GIB), int(free * GIB), int(total * GIB), fraction, LAYOUT, 1024)


def test_the_fraction_counts_what_is_the_processs_own():
    assert pages(own=20, free=80, fraction=0.9) == 70 * 128 - 1
    # The second of two that share: the first has taken its half.
    assert pages(own=20, free=35, fraction=0.45) == 25 * 128 - 1


def test_never_more_than_most_of_what_is_free():
    assert pages(own=0, free=10, fraction=0.9) == int(9.5 * 128) - 1


def test_too_little_is_an_error_that_says_what_to_do():
    for own, free, fraction in ((50, 50, 0.5), (0, 0.05, 0.9), (60, 40, 0.45)):
        with pytest.raises(BatonError, match=r"does not fit: .*raise --memory-fraction"):
            pages(own, free, fraction)
