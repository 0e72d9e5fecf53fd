"""For all tests: one thread for tensor operations, here and in every process that a test starts.

Small machines run many processes at once in these tests; several threads that spin for each other cost far
more than they gain. Set before anything imports torch.
"""

import os

import pytest

from stolen import StolenTime

os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["lanes"]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(StolenTime(), "stolen time")


THOROUGH = ("cluster", "compose")
"""Folders of whole deployments: only what is marked `main_path` there is in `make test`."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in THOROUGH and not item.get_closest_marker("main_path"):
            item.add_marker("thorough")
