"""Faults under load, against real processes: what tests/cluster/test_chaos.py runs for a minute, and
benchmarks/chaos.py and benchmarks/soak.py for as long as they are given.

`tasks` makes requests whose answers are known beforehand, `clients` asks one and judges every event of the
answer, `load` keeps many running, `cluster` starts processes that return at their own addresses, `faults`
hits them at random moments, `rank_faults` single ranks of workers, `role_faults` changes roles, and `run`
puts these together and says what was wrong.
"""

from stress.cluster import Cluster
from stress.faults import Injector
from stress.load import Load
from stress.rank_faults import RankInjector
from stress.role_faults import RoleInjector
from stress.run import Report, run
from stress.tasks import Task, make_tasks, record

__all__ = [
    "Cluster",
    "Injector",
    "Load",
    "RankInjector",
    "Report",
    "RoleInjector",
    "Task",
    "make_tasks",
    "record",
    "run",
]
