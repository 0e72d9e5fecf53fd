"""Sums of ranks, which are processes, in one shot and two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from baton.layers.tensor_parallel import Shard
from baton.worker.ranks.communicator import Rendezvous, meet_on_gpus

SIZES = [
    pytest.param("cuda:0", 2, id="one-gpu-2"),
    pytest.param("cuda:0", 3, id="one-gpu-3"),
    pytest.param("cuda:0", 4, id="one-gpu-4"),
    pytest.param(
        "cuda",
        4,
        id="four-gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="there are fewer than four GPUs"),
    ),
]
"""Where the ranks are, and how many."""
COLUMNS = 512, 7168, 8192
"""Some with words that are masked, and as many as there may be."""
ROWS = 1, 7, 47, 48, 49, 64, 127, 128, 129, 256, 3
"""Around `TWO_SHOT_ROWS`."""
COUNTS = {
    torch.bfloat16: (1, 1000, 699_050, 699_051, 2**19, 2**19 + 1, 2**19 + 8, 100, 2**23 + 16, 4096),
    torch.float32: (2**18 + 3, 2**20),
    torch.int64: (4096, 2**21 + 1),
}
"""Around `ONE_SHOT_BYTES`, and of more than one piece."""


@pytest.mark.parametrize(("place", "ranks"), SIZES)
def test_every_bit_is_that_of_sums_in_the_order_of_the_ranks(tmp_path, place, ranks):
    """In float32, rounded once."""
    torch.multiprocessing.spawn(rank_of, (ranks, place, tmp_path), nprocs=ranks)


def rank_of(rank: int, ranks: int, place: str, folder: Path) -> None:
    device = torch.device("cuda", rank if place == "cuda" else 0)
    torch.cuda.set_device(device)
    own = meet_on_gpus(Shard(rank, ranks), Rendezvous(str(folder / "meet")), 60.0, device)
    generator = torch.Generator(device=device).manual_seed(1)

    def parts(*shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Of each rank, the same on all."""
        return [(torch.randn(shape, generator=generator, device=device) * 50).to(dtype) for _ in range(ranks)]

    def total(given: list[torch.Tensor]) -> torch.Tensor:
        dtype = given[0].dtype
        found = torch.zeros_like(given[0], dtype=torch.float32 if dtype.is_floating_point else dtype)
        for part in given:
            found += part
        return found.to(dtype)

    calls = [(dtype, count) for dtype, counts in COUNTS.items() for count in counts]
    for turn, (dtype, count) in enumerate(calls):
        given = parts(count, dtype=dtype)
        assert torch.equal(own.all_reduce(given[rank].clone()), total(given)), (rank, count, dtype)
        rows, columns = ROWS[turn % len(ROWS)], COLUMNS[turn % len(COLUMNS)]
        weight = torch.ones(columns, device=device, dtype=torch.bfloat16)
        given = parts(rows, columns, dtype=torch.bfloat16)
        residual, *_ = parts(rows, columns, dtype=torch.bfloat16)
        want, out = residual + total(given), torch.empty_like(residual)
        own.add_norm(residual, given[rank].float()[None], weight, out, 1e-6)
        assert torch.equal(residual, want), (rank, rows, columns)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(want, (columns,), weight, 1e-6))
        gathered = own.gather(given[rank])
        assert rank or torch.equal(gathered, torch.cat(given, 1)), (rank, rows)
    own.check()
