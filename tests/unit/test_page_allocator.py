from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kvcache.page_allocator import AccountingError, OutOfPages, PageAllocator, PageCounts, PageState


def test_take_gives_distinct_pages_and_bumps_generations_in_place() -> None:
    memory = bytearray(8 * 4)
    allocator = PageAllocator(4, memoryview(memory).cast("Q"))
    pages = allocator.take(3)
    assert len(set(pages)) == 3
    assert sum(struct.unpack("<4Q", memory)) == 3
    assert [allocator.generation(page) for page in pages] == [1, 1, 1]
    allocator.give_back(pages)
    assert [allocator.generation(page) for page in pages] == [1, 1, 1]
    again = allocator.take(4)
    assert sorted(allocator.generation(page) for page in again) == [1, 2, 2, 2]
    allocator.check()


def test_generation_is_bumped_before_a_page_leaves_the_free_state() -> None:
    seen: list[tuple[int, int]] = []

    class Spy(list[int]):
        def __setitem__(self, page, value) -> None:  # type: ignore[no-untyped-def, override]
            seen.append((page, allocator.state(page)))
            super().__setitem__(page, value)

    allocator = PageAllocator(2, Spy([0, 0]))
    pages = allocator.take(2)
    assert sorted(seen) == sorted((page, PageState.FREE) for page in pages)


def test_out_of_pages_takes_nothing() -> None:
    allocator = PageAllocator(3)
    allocator.take(2)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 free"):
        allocator.take(2)
    assert allocator.free == 1
    assert sum(allocator.generation(page) for page in range(3)) == 2
    allocator.check()


MOVES = {
    "give_back": (PageState.OWNED, PageState.FREE),
    "to_cached": (PageState.OWNED, PageState.CACHED),
    "drop_cached": (PageState.CACHED, PageState.FREE),
    "quarantine": (PageState.OWNED, PageState.QUARANTINED),
}


def in_each_state() -> tuple[PageAllocator, dict[PageState, list[int]]]:
    allocator = PageAllocator(8)
    pages = allocator.take(6)
    allocator.to_cached(pages[:2])
    allocator.quarantine(pages[2:4])
    free = [page for page in range(8) if page not in pages]
    return allocator, {
        PageState.FREE: free,
        PageState.OWNED: pages[4:],
        PageState.CACHED: pages[:2],
        PageState.QUARANTINED: pages[2:4],
    }


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", PageState)
def test_each_move_accepts_one_state_only(move: str, state: PageState) -> None:
    allocator, pages = in_each_state()
    source, target = MOVES[move]
    before = allocator.counts()
    if state is source:
        getattr(allocator, move)(pages[state])
        assert all(allocator.state(page) is target for page in pages[state])
    else:
        # A good page first: it must stay where it was.
        with pytest.raises(
            AccountingError, match=f"page {pages[state][0]} is {state.name}: not {source.name}"
        ):
            getattr(allocator, move)([pages[source][0], pages[state][0]])
        assert allocator.state(pages[source][0]) is source
        assert allocator.counts() == before
    allocator.check()


@pytest.mark.parametrize("bad", [-1, 8])
def test_pages_out_of_range_are_refused(bad: int) -> None:
    allocator, _ = in_each_state()
    with pytest.raises(AccountingError, match=f"page {bad} is not one of the pool's 8"):
        allocator.give_back([bad])
    with pytest.raises(IndexError):
        allocator.generation(bad)


def test_a_page_named_twice_is_refused() -> None:
    allocator, pages = in_each_state()
    with pytest.raises(AccountingError, match="twice"):
        allocator.give_back([pages[PageState.OWNED][0]] * 2)
    allocator.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("states", "pages are OWNED, counted"),
        ("not free", "pages in free runs"),
        ("duplicate", "pages in free runs"),
        ("count", "pages in free runs"),
        ("another", "are in a free run and not free"),
    ],
)
def test_check_sees_damage(damage: str, message: str) -> None:
    allocator, pages = in_each_state()
    allocator.check()
    owned = pages[PageState.OWNED][0]
    if damage == "states":
        allocator._states[owned] = PageState.CACHED
    elif damage == "not free":
        allocator._free.add([owned])
    elif damage == "duplicate":
        allocator._free.add([next(iter(allocator._free))])
    elif damage == "count":
        allocator._free._count += 1
    else:  # the one instead of the other
        (taken,) = allocator._free.take(1)
        allocator._free.add([owned])
        assert allocator._states[taken] == PageState.FREE
    with pytest.raises(AccountingError, match=message):
        allocator.check()


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="3 generations for 4 pages"):
        PageAllocator(4, [0, 0, 0])
    with pytest.raises(ValueError, match="cannot take -1"):
        PageAllocator(4).take(-1)


@given(st.lists(st.tuples(st.sampled_from(["take", *MOVES]), st.sets(st.integers(0, 5), min_size=1))))
def test_against_a_list_of_states(operations: list[tuple[str, set[int]]]) -> None:
    allocator = PageAllocator(6)
    states = [PageState.FREE] * 6
    generations = [0] * 6
    for name, pages in operations:
        if name == "take":
            if len(pages) > states.count(PageState.FREE):
                with pytest.raises(OutOfPages):
                    allocator.take(len(pages))
                continue
            for page in allocator.take(len(pages)):
                assert states[page] is PageState.FREE
                states[page] = PageState.OWNED
                generations[page] += 1
        elif all(states[page] is MOVES[name][0] for page in pages):
            getattr(allocator, name)(pages)
            for page in pages:
                states[page] = MOVES[name][1]
        else:
            with pytest.raises(AccountingError):
                getattr(allocator, name)(pages)
        allocator.check()
        assert [allocator.state(page) for page in range(6)] == states
        assert [allocator.generation(page) for page in range(6)] == generations
        counts = [states.count(state) for state in PageState]
        assert allocator.counts() == PageCounts(6, *counts)
