"""The map of a pool: it loses nothing but the order inside a cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.kvcache.page_map import CellRun, PageMap, PageUse, mark, page_map

F, O, C, Q, L, P = (int(use) for use in PageUse)  # noqa: E741


def one(use: int) -> tuple[int, ...]:
    return tuple(int(each == use) for each in PageUse)


def test_equal_neighbours_are_one_run():
    found = page_map(bytes([F, F, C, C, C, P]), 100)
    assert found == PageMap(6, 1, (CellRun(2, one(F)), CellRun(3, one(C)), CellRun(1, one(P))))


def test_a_cell_of_several_pages_counts_them_and_the_last_may_have_fewer():
    found = page_map(bytes([F, C, C, F, L, Q, O]), 3)
    assert found.pages_per_cell == 3
    counts = [dict(zip(PageUse, run.pages, strict=True)) for run in found.runs]
    assert [run.cells for run in found.runs] == [1, 1, 1]
    assert counts[0][PageUse.FREE] == 1 and counts[0][PageUse.CACHED] == 2
    assert counts[2] == {**dict.fromkeys(PageUse, 0), PageUse.OWNED: 1}


def test_a_mark_spares_what_is_free_or_quarantined():
    uses = bytearray([F, O, C, Q])
    mark(uses, range(4), PageUse.LEASED)
    assert list(uses) == [F, L, L, Q]


@given(st.binary(min_size=1, max_size=400), st.integers(1, 500))
def test_every_page_is_counted_once_in_few_cells(data: bytes, max_cells: int):
    uses = bytes(value % len(PageUse) for value in data)
    found = page_map(uses, max_cells)
    cells = [run.pages for run in found.runs for _ in range(run.cells)]
    assert len(cells) <= max_cells and found.total == len(uses)
    for number, cell in enumerate(cells):
        pages = uses[number * found.pages_per_cell : (number + 1) * found.pages_per_cell]
        assert cell == tuple(pages.count(use) for use in PageUse)
    assert all(a.pages != b.pages for a, b in zip(found.runs, found.runs[1:], strict=False))
