"""A bug in changes of role."""

from __future__ import annotations

import baton.sim.cluster
from baton.sim.scenario_roles import make_role_scenario
from baton.worker.core import WorkerCore
from planted.planting import Wrong, bug


@bug(
    "role-not-quiet",
    "a change of role does not wait for leases and copies",
    25,
    baton.sim.cluster,
    "is_quiet",
    seed=3,
    scenario=make_role_scenario,
)
def _(is_quiet: Wrong, core: WorkerCore) -> bool:
    return not core.scheduler.requests
