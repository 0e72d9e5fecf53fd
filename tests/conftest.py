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


LONGEST = (
    "compose/",
    "cluster/test_client_suites.py",
    "cluster/test_exactness.py",
    "cluster/test_ranks_on_hosts.py",
    "cluster/test_bench.py",
    "unit/test_cli_up.py",
    "cluster/test_smollm2.py",
    "sim/test_simulator.py",
    "cluster/test_ranks.py",
    "cluster/test_accounting.py",
    "cluster/test_eval_suites.py",
    "cluster/test_closed_deployment.py",
    "cluster/test_chaos.py",
    "cluster/test_page.py",
    "cluster/test_up.py",
    "unit/test_lost_ranks.py",
    "cluster/test_hosts.py",
    "sim/test_planted_bugs.py",
    "cluster/test_strangers.py",
    "cluster/test_memory_pressure.py",
    "cluster/test_upgrades.py",
    "cluster/test_cancel.py",
    "cluster/test_traces.py",
    "cluster/test_plan.py",
    "cluster/test_health.py",
    "cluster/test_cache_stream.py",
    "cluster/test_structured_output.py",
    "cluster/test_discovery_etcd.py",
    "contract/test_slow_readers.py",
    "contract/test_resume.py",
    "contract/test_inference.py",
    "unit/test_cli_sim.py",
)
"""Files that take longest: lanes begin with them, so that none is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(LONGEST) if f"tests/{name}" in item.nodeid), len(LONGEST))

    items.sort(key=rank)
