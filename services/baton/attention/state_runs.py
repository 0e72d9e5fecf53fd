"""How the states of recurrent layers go through a step: see layers.cache_spec.State."""

from __future__ import annotations

import torch

from baton.attention.base import AttentionRows
from baton.layers.batch import StateRun
from baton.layers.cache_spec import State


def state_runs(rows: AttentionRows, group: int, page_size: int, device: torch.device) -> list[StateRun]:
    """The runs of these rows in a state group."""
    assert rows.host is not None, "recurrent layers are in no CUDA graph"
    if rows.longest == 1:
        reads, writes, begins = [], [], []
        for row in rows.host:
            table, start = row.tables[group], row.start
            writes.append(table[start // page_size])
            reads.append(table[(start - 1) // page_size] if start else writes[-1])
            begins.append(not start)
        return [
            StateRun(
                rows.first,
                rows.tokens,
                len(reads),
                torch.tensor(reads, device=device),
                torch.tensor(writes, device=device),
                torch.tensor(begins, device=device) if any(begins) else None,
            )
        ]
    runs, first = [], rows.first
    for row in rows.host:
        table = row.tables[group]
        start = row.start
        for end in State.stops(start, start + row.count, page_size):
            write = table[(end - 1) // page_size]
            read = table[(start - 1) // page_size] if start else write
            places = torch.tensor([read, write], device=device)
            begins_here = None if start else torch.ones(1, dtype=torch.bool, device=device)
            runs.append(StateRun(first, end - start, 1, places[:1], places[1:], begins_here))
            first, start = first + end - start, end
    return runs
