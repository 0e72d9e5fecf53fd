"""A Ray cluster of several hosts, all on this machine: a raylet each. Run by a Python that has Ray, with the
number of CPUs of each as arguments; the first is the head. Prints a line of JSON, the head's address, the
raylets' pids and that of the head's store (GCS), and ends the cluster when its standard input ends."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
TRIES = 4
"""A raylet waits 15 s for its agents, which is too short on a busy machine. The first try warms the disk."""


def add_host(cluster: Cluster, cpus: int) -> Any:
    settings = {"num_cpus": cpus, "num_gpus": 0, "object_store_memory": STORE_BYTES}
    for _ in range(TRIES - 1):
        with contextlib.suppress(Exception):
            return cluster.add_node(**settings, include_dashboard=False)
        if cluster.head_node is None:
            cluster.shutdown()
    return cluster.add_node(**settings, include_dashboard=False)


def main() -> None:
    cluster = Cluster()
    nodes = [add_host(cluster, int(count)) for count in sys.argv[1:]]
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    store = nodes[0].all_processes["gcs_server"][0].process.pid
    print(json.dumps({"address": cluster.address, "raylets": raylets, "store": store}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


main()
