"""All tests can be collected in one run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_files_have_one_name():
    """They would be one module. Those of GPUs run by themselves."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py") if file.parent.name != "gpu")
    assert [name for name, count in names.items() if count > 1] == []
