"""The slots on the device follow the plans, and one upload brings arrays of any dtype."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.batch import HostBatch
from baton.engine.device_slots import DeviceSlots, _continues
from baton.engine.plan import PlanRow
from baton.kvcache.kv_groups import NO_PAGE
from baton.layers.async_copy import Upload
from settled_rows import settle

CPU = torch.device("cpu")


def row(slot, pages, start=5):
    return PlanRow(slot, None, start, (tuple(pages),))


def write(there, changes):
    there.write(*(torch.from_numpy(array) for array in changes))


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_steps(seed):
    """Sequences grow, end, and pass their slots on; some pages are shared, some tables too long. Some last
    tokens come from the host."""
    rng = random.Random(seed)
    slots, width, spare = 5, 8, 99
    there = DeviceSlots(slots, width, spare, CPU)
    tokens = [0] * (slots + 1)
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
            there.changes(rows, {})  # of a launch that failed before they were written
            there.forget(rows)
        fresh = {one.slot: rng.randrange(1000) for one in rows if rng.random() < 0.2}
        for slot, token in fresh.items():
            tokens[slot] = token
        changes = there.changes(rows, fresh)
        if changes is not None:
            written += len(changes[0])
            write(there, changes)
        write(there, there.unchanging)
        for one in rows:
            (table,) = one.tables
            assert there.tables[one.slot, 0, : len(table)].tolist() == list(table[:width])
        assert there.tables[slots].tolist() == [[spare] * width]
        assert there.last_token.tolist() == tokens
    assert written < 400 * slots * width / 4


def test_tables_of_groups_and_pages_that_are_gone():
    """What has left a window stays as it was; what a sequence begins without is the spare page."""
    there = DeviceSlots(2, 4, 9, CPU, groups=2)

    starts = iter(range(5, 10))

    def both(slot, first, second):
        row = PlanRow(slot, None, next(starts), (tuple(first), tuple(second)))
        changes = there.changes([row], {})
        if changes is not None:
            write(there, changes)
        return 0 if changes is None else len(changes[0])

    assert both(1, [1, 2], [3, 4]) == 5  # and a mark of damage
    assert there.tables[1].tolist() == [[1, 2, 9, 9], [3, 4, 9, 9]]
    assert both(1, [1, 2, 5], [NO_PAGE, 4, 6]) == 2
    assert there.tables[1].tolist() == [[1, 2, 5, 9], [3, 4, 6, 9]]
    assert both(1, [1, 2, 5], [NO_PAGE, NO_PAGE, 6]) == 0
    assert both(1, [7, 8], [NO_PAGE, 2]) == 5
    assert there.tables[1, :, :2].tolist() == [[7, 8], [9, 2]]
    assert there.tables[0].tolist() == there.tables[2].tolist() == [[9] * 4] * 2


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ((1, 2, 3), True),
        ((1, 2, 3, 4), True),
        ((1, 2), False),
        ((NO_PAGE, 2, 3), True),
        ((NO_PAGE, NO_PAGE, 3, 4), True),
        ((NO_PAGE, 9, 3), False),
        ((9, 2, NO_PAGE), False),
        ((NO_PAGE, 2), False),
    ],
)
def test_a_table_goes_on_where_no_page_has_become_another(pages, expected):
    assert _continues((1, 2, 3), pages) == expected


def test_what_is_known_is_not_written_again():
    there = DeviceSlots(2, 4, 9, CPU)
    assert there.changes([row(0, [1, 2])], {}) is not None
    assert there.changes([row(0, [1, 2], 6)], {}) is None
    _, values = there.changes([row(0, [1, 2, 3], 7), row(1, [7])], {1: 5})
    assert values.tolist() == [5, 3, 7, 0]


def test_damage_ends_with_its_sequence():
    there = DeviceSlots(2, 4, 9, CPU)
    steps = (
        ([1], 0, False),
        ([1, 2], 1, True),
        ([1, 2], 0, False),
        ([3], 1, False),  # another table
        ([3], 2, True),
        ([3], 1, False),  # another sequence whose prefix is cached, in the same slot and pages
        ([3], 2, True),
    )
    for pages, start, damaged in steps:
        changes = there.changes([PlanRow(1, None, start, (tuple(pages),))], {})
        if changes is not None:
            write(there, changes)
        assert there.nan_flags.isnan().tolist() == [False, damaged, False]
        there.nan_flags[1] = torch.nan
    there.forget([row(0, [8])])  # a step of others has failed
    write(there, there.changes([PlanRow(1, None, 3, ((3,),))], {}))
    assert there.nan_flags.isnan().tolist() == [False, True, False]
    # A hand-off of the same length, into the same slot and pages.
    write(there, there.changes([PlanRow(1, None, 4, ((3,),))], {1: 7}))
    assert there.nan_flags.isnan().tolist() == [False, False, False]
    # A second choice of a prompt of the same length, likewise.
    there.nan_flags[1] = torch.nan
    write(there, there.changes([PlanRow(0, (5, 5, 5, 5, 5), 0, ((4,),), (0, 1))], {}))
    assert there.changes([PlanRow(1, None, 5, ((3,),))], {}) is None
    assert there.nan_flags.isnan().tolist() == [False, False, False]


def test_what_a_failed_step_did_not_write_is_due_in_the_next():
    there = DeviceSlots(2, 4, 9, CPU)
    write(there, there.changes([row(0, [1], 3), row(1, [2], 3)], {}))
    there.nan_flags[:2] = torch.nan
    failed = [PlanRow(1, (5, 5), 0, ((3,),))]
    there.changes(failed, {})
    there.forget(failed)
    # A sequence of the same length in slot 1; slot 0 goes on with its own.
    write(there, there.changes([row(0, [1], 4), row(1, [4], 2)], {}))
    assert there.tables[:2, 0, 0].tolist() == [1, 4]
    assert there.nan_flags.isnan().tolist() == [True, False, False]
    there.nan_flags[1] = (
        torch.nan
    )  # by that step, behind which one of others fails before its changes are made
    there.forget([])
    write(there, there.changes([row(1, [4], 3)], {}))
    assert there.nan_flags.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("pages", [(4,), (6, 7)])
@pytest.mark.parametrize("failure", ["before", "behind", "of others"])
def test_damage_of_a_sequence_that_failed_with_its_step_is_not_the_next_ones(failure, pages):
    """Which begins where that one ended, in its pages or in others. `failure`: of the damaged sequence's step
    before its changes are written, or behind; or of a step of others, when that one had ended."""
    there = DeviceSlots(2, 4, 9, CPU)
    write(there, there.changes([row(0, [1], 3), PlanRow(1, (5,) * 4, 0, ((4,),))], {}))
    there.nan_flags[1] = torch.nan
    if failure == "of others":
        failed, start = [row(0, [1], 4)], 4
    else:
        failed, start = [PlanRow(1, None, 4, ((4,),))], 5
    changes = there.changes(failed, {})
    if failure == "behind" and changes is not None:
        write(there, changes)
    there.forget(failed)
    new = there.changes([PlanRow(1, (7, 7), start, (pages,))], {})
    write(there, new)
    same = failure == "of others" and pages == (4,)  # it may be the sequence itself that goes on
    assert there.nan_flags.isnan().tolist() == [False, same, False]


def test_rows_of_one_token_come_first():
    """Their tokens are on the device: -1 stands for them."""
    rows = [
        PlanRow(3, (5, 6, 7), 4, ((0,),), (3,)),
        PlanRow(1, None, 9, ((0,),), (1,)),
        PlanRow(2, (8,), 0, ((0,),), ()),
    ]
    batch = HostBatch.of(rows)
    assert batch.order == [1, 2, 0] and batch.single == 2 and batch.tokens == 5
    assert batch.ids.tolist() == [-1, 8, 5, 6, 7]
    assert batch.positions.tolist() == [9, 0, 4, 5, 6]
    assert batch.token_slots.tolist() == [1, 2, 3, 3, 3] and batch.row_slots.tolist() == [1, 2, 3]
    assert batch.starts.tolist() == [0, 1, 2, 5] and batch.lengths.tolist() == [10, 1, 7]
    assert batch.slots.tolist() == [3, 1] and batch.targets.tolist() == [7, 10]
    assert batch.logits_indices.tolist() == [4, 0]


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


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_follow_unread_drafts(seed):
    """The device makes of them what the host would, knowing how many of those drafts were right; and of rows
    with drafts that only the device knows."""
    rng = random.Random(seed)
    slots = 8
    there = DeviceSlots(slots, 4, 99, CPU)
    there.last_token.copy_(torch.tensor([1000 + slot for slot in range(slots + 1)]))
    rows, right, guesses = [], {}, [rng.randrange(99) for _ in range(20)]
    for slot in rng.sample(range(slots), rng.randrange(1, slots)):
        one = row(slot, [1, 2], start=rng.randrange(30))
        one.sample = (slot,)
        if rng.random() < 0.2:
            one.tokens = [rng.randrange(99) for _ in range(rng.randrange(1, 9))]
        else:
            one.ahead = rng.choice([0, 0, 1, 3])
            one.drafts = tuple(rng.randrange(99) for _ in range(one.ahead + rng.randrange(4)))
            if not one.ahead and rng.random() < 0.5:
                one.drafts = tuple(-1 - rng.randrange(20) for _ in one.drafts)
        right[slot] = rng.randrange(one.ahead + 1)
        there.right[slot] = right[slot] if one.ahead else 7
        rows.append(one)
    host = HostBatch.of(rows)
    known = HostBatch.of([one.settled(right[one.slot], guesses) for one in rows])
    at, which = host.guesses
    host.drafts[at] = np.array(guesses)[which]
    assert not known.guesses.size and len(known.drafts) == 0
    ids, positions, lengths, token_slots, row_slots = (
        torch.from_numpy(each.copy())
        for each in (host.ids, host.positions, host.lengths, host.token_slots, host.row_slots)
    )
    drafts = torch.from_numpy(np.append(host.drafts, 0))
    settle(there, ids, positions, lengths, token_slots, row_slots, drafts)
    expected = torch.from_numpy(known.ids)
    expected = torch.where(
        expected < 0, there.last_token[torch.from_numpy(known.token_slots).long()], expected
    )
    assert ids.tolist() == expected.tolist()
    assert positions.tolist() == known.positions.tolist()
    assert lengths.tolist() == known.lengths.tolist()
    for name in ("order", "longest", "single"):
        assert getattr(host, name) == getattr(known, name)
    for name in ("starts", "logits_indices", "depths", "slots", "token_slots"):
        assert getattr(host, name).tolist() == getattr(known, name).tolist()
    assert host.follows == any(one.ahead for one in rows) and not known.follows
    # Should this step's sampling fail, no draft of it was right.
    assert all(there.right[one.slot] == 0 for one in rows)
    # What is sampled first is behind the token that it is sampled from.
    firsts = np.cumsum(host.depths) - host.depths
    assert known.targets.tolist() == [known.positions[known.logits_indices[at]] + 1 for at in firsts]
