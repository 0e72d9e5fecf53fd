"""How large steps are where nobody says."""

import pytest
import torch

from baton.config import WorkerConfig
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
