"""For all tests: one thread for tensor operations, here and in every process that a test starts.

Small machines run many processes at once in these tests; several threads that spin for each other cost far
more than they gain. Set before anything imports torch.
"""

import os

import pytest

from stolen import StolenTime

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(StolenTime(), "stolen time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The image is built first, which takes minutes, while other lanes go on."""
    items.sort(key=lambda item: "tests/compose/" not in item.nodeid)
