from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch


@cache
def problem() -> str | None:
    """Why there is no Hopper GPU and no sgl_kernel, which everything here needs."""
    from baton.attention.fa3 import Fa3Attention

    return Fa3Attention.available(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class Skipped(pytest.Module):
    """A file that is skipped as a whole, and not imported."""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip(f"GPU tests: {problem()}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if problem() else None
