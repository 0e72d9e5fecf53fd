"""The pool of embeddings: leases keep pages, those least recently used make room, reuse is seen."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from baton.engine.image_spans import ImageSpan
from baton.kvcache.page_allocator import OutOfPages
from baton.worker.encode.pool import EmbeddingPool

PAGE, TOKENS, VALUES = 48, 4, 5
PAGES_EACH = 4
"""Of an image: 2 * 4 * 5 numbers of four bytes, in pages of 48."""


class Rig:
    def __init__(self, images):
        self.now = 0.0
        self.rows = np.zeros((PAGES_EACH * images, PAGE), np.uint8)
        self.generations = array("Q", bytes(8 * len(self.rows)))
        self.pool = EmbeddingPool(self.rows, self.generations, lambda: self.now, 30.0)

    def add(self, number):
        embeddings = torch.full((2, TOKENS, VALUES), float(number))
        stored = self.pool.take(bytes([number]) * 32, embeddings)
        self.pool.write(stored, embeddings)
        self.pool.keep(stored)

    def lend(self, number, columns=TOKENS):
        return self.pool.lend(ImageSpan(0, 1, columns, bytes([number]) * 32))

    def read(self, lease):
        found = torch.frombuffer(bytearray(self.pool.read(lease)), dtype=torch.float32)
        return found.view(lease.stored.shape)

    def current(self, lease):
        return [self.generations[page] for page in lease.stored.pages] == lease.generations


def test_the_least_recently_used_make_room():
    rig = Rig(3)
    for number in (1, 2, 3):
        rig.add(number)
    rig.pool.give_back(rig.lend(1))
    rig.add(4)
    assert [number for number in (1, 2, 3, 4) if rig.lend(number)] == [1, 3, 4]
    assert (rig.read(rig.lend(4)) == 4).all() and rig.lend(4, columns=5) is None
    assert rig.pool.counts().free == 0 and rig.pool.counts().cached == 12


def test_what_is_lent_stays_for_as_long_as_it_is_lent():
    rig = Rig(2)
    rig.add(1), rig.add(2)
    leases = [rig.lend(1), rig.lend(1), rig.lend(2)]
    with pytest.raises(OutOfPages):
        rig.add(3)
    rig.pool.give_back(leases[0])
    with pytest.raises(OutOfPages):
        rig.add(3)
    assert all(lease.stood and rig.current(lease) for lease in leases[1:])
    rig.pool.give_back(leases[2])
    rig.add(3)
    assert rig.lend(2) is None and leases[1].stood and (rig.read(leases[1]) == 1).all()
    assert rig.pool.leases == 1


def test_pages_that_are_reused_after_the_time_of_a_lease_are_seen():
    rig = Rig(1)
    rig.add(1)
    lease = rig.lend(1)
    rig.now = 31.0
    assert lease.stood
    rig.add(2)
    assert not lease.stood and not rig.current(lease)
    rig.pool.give_back(lease)
    again = rig.lend(2)
    assert again.stood and rig.current(again)


def test_an_image_that_is_made_anew_replaces_itself():
    rig = Rig(2)
    rig.add(1)
    lease = rig.lend(1)
    rig.add(1)
    assert not lease.stood and rig.pool.counts().cached == PAGES_EACH == rig.pool.counts().free
    failed = rig.pool.take(bytes(32), torch.zeros(2, TOKENS, VALUES))
    rig.pool.drop(failed)
    assert rig.pool.counts().free == PAGES_EACH
