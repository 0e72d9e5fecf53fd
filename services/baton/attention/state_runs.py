"""How the states of recurrent layers go through a step: see layers.cache_spec.State."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from baton.attention.base import AttentionRows, HostRow
from baton.layers.batch import PIECE, StateRun
from baton.layers.cache_spec import State

Located = list[tuple[int, HostRow]]
"""Rows, and the index in the step of each one's first token that is meant."""


def state_runs(rows: AttentionRows, group: int, page_size: int, device: torch.device) -> list[StateRun]:
    """The runs of these rows in a state group: first the last tokens of sequences, then the drafts behind
    them; prompts row by row."""
    assert rows.host is not None, "in a CUDA graph kernels read the tables"
    last: dict[int, Located] = {}
    """By the number of drafts that go into the state before."""
    drafted: dict[int, Located] = {}
    """By their number."""
    chunks: Located = []
    at = rows.first
    for row in rows.host:
        if row.count > 1 and not row.drafts:
            chunks.append((at, row))
        else:
            last.setdefault(row.replay, []).append((at, row))
        if row.drafts:
            drafted.setdefault(len(row.drafts), []).append((at + 1, row))
        at += row.count
    runs = [_last_tokens(located, replay, group, page_size, device) for replay, located in last.items()]
    runs += [_drafts(located, count, group, page_size, device) for count, located in drafted.items()]
    for at, row in chunks:
        runs += _chunk(at, row, group, page_size, device)
    return runs


def _last_tokens(located: Located, replay: int, group: int, page_size: int, device: torch.device) -> StateRun:
    """One token of each row."""
    reads, writes, begins = [], [], []
    for _, row in located:
        table, before = row.tables[group], row.start - replay
        writes.append(table[row.start // page_size])
        reads.append(table[(before - 1) // page_size] if before else writes[-1])
        begins.append(not before)
    return StateRun(
        _tokens([at for at, _ in located], device),
        len(located),
        torch.tensor(reads, device=device),
        torch.tensor(writes, device=device),
        torch.tensor(begins, device=device) if any(begins) else None,
        _slots(located, device) if replay else None,
        replay,
    )


def _drafts(located: Located, count: int, group: int, page_size: int, device: torch.device) -> StateRun:
    """The drafts of rows, behind the state that their last tokens have just left."""
    reads = [row.tables[group][row.start // page_size] for _, row in located]
    return StateRun(
        _tokens(list(chain.from_iterable(range(at, at + count) for at, _ in located)), device),
        len(located),
        torch.tensor(reads, device=device),
        None,
        slots=_slots(located, device),
    )


def _chunk(first: int, row: HostRow, group: int, page_size: int, device: torch.device) -> list[StateRun]:
    """A run to each position behind which the state is kept."""
    table, start, runs = row.tables[group], row.start, []
    for end in State.stops(start, start + row.count, page_size):
        write = table[(end - 1) // page_size]
        read = table[(start - 1) // page_size] if start else write
        pages = torch.tensor([read, write], device=device)
        begins = None if start else torch.ones(1, dtype=torch.bool, device=device)
        runs.append(StateRun(slice(first, first + end - start), 1, pages[:1], pages[1:], begins))
        first, start = first + end - start, end
    return runs


def _tokens(indexes: Sequence[int], device: torch.device) -> slice | torch.Tensor:
    if indexes[-1] - indexes[0] + 1 == len(indexes):
        return slice(indexes[0], indexes[-1] + 1)
    return torch.tensor(indexes, device=device)


def _slots(located: Located, device: torch.device) -> torch.Tensor:
    return torch.tensor([row.slot for _, row in located], device=device)


def state_pieces(
    rows: Sequence[HostRow], first: int, page_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """`pieces` and `starts` of `layers.batch.StateRows` for these rows, whose tokens begin at `first`."""
    pieces: list[tuple[int, int, int, bool]] = []
    starts = [0]
    for row in rows:
        begin, at = first, row.start
        for end in State.stops(at, at + row.count, page_size):
            while at < end:
                count = min(PIECE, end - at)
                at += count
                pieces.append((first, count, begin, at == end))
                first += count
        starts.append(len(pieces))
    return np.array(pieces, np.int32), np.array(starts, np.int32)
