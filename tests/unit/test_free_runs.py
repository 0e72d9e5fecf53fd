from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.kvcache.page_allocator import FreeRuns


def runs_of(pages: list[int]) -> int:
    return sum(1 for i, page in enumerate(pages) if i == 0 or page != pages[i - 1] + 1)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 30)), max_size=60))
def test_every_page_is_free_or_taken_and_runs_are_merged(total: int, moves: list[tuple[bool, int]]) -> None:
    free, held = FreeRuns(total), [list[int]()]
    for take, number in moves:
        if take and len(free):
            held.append(free.take(1 + number % len(free)))
        else:
            free.add(reversed(held.pop(number % len(held))) if held else [])
        pages = sorted(free)
        assert sorted(pages + [page for pages in held for page in pages]) == list(range(total))
        assert len(free) == len(pages)
        # Merged: no run ends where another begins, so that all of a run can be had at once.
        if pages:
            longest = max(len(run) for run in split(pages))
            taken = free.take(longest)
            assert runs_of(taken) == 1
            free.add(taken)


def split(pages: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for page in pages:
        if found and found[-1][-1] == page - 1:
            found[-1].append(page)
        else:
            found.append([page])
    return found


def test_pages_of_a_prompt_are_adjacent_although_others_come_and_go() -> None:
    free = FreeRuns(100)
    first, second, third = free.take(20), free.take(30), free.take(10)
    free.add(second)
    assert free.take(25) == second[:25]
    free.add(first)
    free.add(third)
    assert runs_of(free.take(50)) == 1


def test_what_was_freed_last_is_taken_first() -> None:
    """A pool in light use touches little of its memory."""
    free = FreeRuns(1 << 20)
    touched = set()
    for _ in range(100):
        pages = free.take(7)
        touched.update(pages)
        free.add(pages)
    assert len(touched) == 7


def test_too_few_in_one_run_are_taken_from_the_longest() -> None:
    free = FreeRuns(10)
    free.take(10)
    free.add([0, 1, 4, 5, 6, 9])
    assert free.take(5) == [4, 5, 6, 0, 1]


def test_a_run_that_is_too_short_by_a_page_is_left() -> None:
    """Both reach the same power of two; the shorter is the younger."""
    free = FreeRuns(20)
    free.take(20)
    free.add(range(8, 15))
    free.add(range(1, 6))
    assert free.take(6) == list(range(8, 14))
