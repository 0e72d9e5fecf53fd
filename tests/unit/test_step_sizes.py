"""How large steps are where nobody says, and which of those with prompt chunks have a CUDA graph."""

import pytest
import torch

from baton.config import WorkerConfig
from baton.engine.batch import HostBatch
from baton.engine.chunk_graphs import (
    CHUNK_SIZES,
    MIXTURE_CHUNK_SIZES,
    ChunkGraphs,
    chunk_shapes,
    chunk_sizes,
    draft_shapes,
)
from baton.engine.plan import PlanRow
from baton.worker.model import sized


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", {}, (64, 512)),
        ("cuda", {}, (256, 2048)),
        ("cpu", {"token_budget": 16}, (16, 16)),
        ("cuda", {"token_budget": 512}, (256, 512)),
        ("cpu", {"max_rows": 1000}, (1000, 1000)),
        ("cpu", {"max_rows": 8, "token_budget": 4}, (8, 4)),
    ],
)
def test_sizes(device, given, expected):
    config = sized(WorkerConfig(**given), torch.device(device))
    assert (config.max_rows, config.token_budget) == expected


@pytest.mark.parametrize(
    ("mixture", "budget", "largest"),
    [
        (False, 8192, CHUNK_SIZES[-1]),
        (True, 8192, MIXTURE_CHUNK_SIZES[-1]),
        (True, 1024, 1024),
        (True, 1025, 1280),
        (False, 512, 512),
        (False, 100, 128),
        (True, 1, 16),
    ],
)
def test_no_graph_is_longer_than_a_step_needs(mixture, budget, largest):
    sizes = MIXTURE_CHUNK_SIZES if mixture else CHUNK_SIZES
    assert chunk_sizes(mixture, budget, 4096) == tuple(size for size in sizes if size <= largest)


def test_no_graph_is_longer_than_the_context():
    assert chunk_sizes(True, 2048, 1000)[-1] == 768 and chunk_sizes(True, 2048, 8) == ()


def test_a_graph_has_room_for_all_that_is_sampled():
    """The last chunk of a prompt samples for each of its choices."""
    graphs = object.__new__(ChunkGraphs)
    graphs._shapes = draft_shapes(7, 64) + chunk_shapes(CHUNK_SIZES, 64)
    rows = [
        PlanRow(0, None, 10, ((0,),), (0,), drafts=(1, 2, 3)),
        PlanRow(1, [5, 6, 7], 16, ((1, 2),), (1, 2, 3, 4)),
    ]
    for step in (HostBatch.of(rows), HostBatch.of(rows[:1])):
        shape = graphs.shape(step)
        assert (
            shape is not None
            and shape.rows >= len(step.slots)
            and shape.num_logits >= len(step.logits_indices)
        )
