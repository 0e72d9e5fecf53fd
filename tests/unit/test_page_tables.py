"""Page tables on the device follow the plans, and one upload brings arrays of any dtype."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.page_tables import PageTables
from baton.engine.plan import PlanRow
from baton.engine.upload import Upload

CPU = torch.device("cpu")


def row(slot, pages):
    return PlanRow(slot, None, 0, tuple(pages))


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_steps(seed):
    """Sequences grow, end, and pass their slots on; some pages are shared, some tables too long."""
    rng = random.Random(seed)
    slots, width, spare = 5, 8, 99
    tables = PageTables(slots, width, spare, CPU)
    pages = [[rng.randrange(50)] for _ in range(slots)]
    written = 0
    for _ in range(400):
        rows = []
        for slot in rng.sample(range(slots), rng.randrange(1, slots + 1)):
            if rng.random() < 0.1:
                keep = rng.randrange(len(pages[slot]) + 1)
                pages[slot] = [*pages[slot][:keep], rng.randrange(50)]
            elif rng.random() < 0.5 and len(pages[slot]) < width + 2:
                pages[slot] = [*pages[slot], rng.randrange(50)]
            rows.append(row(slot, pages[slot]))
        if rng.random() < 0.05:
            tables.forget()
        changes = tables.changes(rows)
        if changes is not None:
            written += len(changes[0])
            tables.write(*(torch.from_numpy(array) for array in changes))
        for one in rows:
            assert tables.table[one.slot, : len(one.pages)].tolist() == list(one.pages[:width])
        assert tables.table[slots].tolist() == [spare] * width
    assert written < 400 * slots * width / 4


def test_what_is_known_is_not_written_again():
    tables = PageTables(2, 4, 9, CPU)
    assert tables.changes([row(0, [1, 2])]) is not None
    assert tables.changes([row(0, [1, 2])]) is None
    entries, values = tables.changes([row(0, [1, 2, 3]), row(1, [7])])
    assert entries.tolist() == [2, 4] and values.tolist() == [3, 7]


def test_upload():
    upload = Upload()
    arrays = [
        np.arange(5, dtype=np.int32),
        np.array([2**62, -1], np.int64),
        np.zeros(0, np.float32),
        np.array([[1.5, 2.5], [3.5, 4.5]], np.float32)[:, ::-1],
    ]
    assert [upload.add(array) for array in arrays] == [0, 1, 2, 3]
    for array, tensor in zip(arrays, upload.send(CPU), strict=True):
        assert tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)
