"""Bugs in changes of role."""

from __future__ import annotations

from collections.abc import Sequence

import baton.sim.cluster
from baton.gateway.role_balance import RoleBalance, RoleLoad
from baton.sim.scenario_roles import make_auto_scenario, make_role_scenario
from baton.worker.core import WorkerCore
from planted.planting import Wrong, bug


@bug(
    "role-not-quiet",
    "a change of role does not wait for leases and copies",
    25,
    baton.sim.cluster,
    "is_quiet",
    seed=10,
    scenario=make_role_scenario,
)
def _(is_quiet: Wrong, core: WorkerCore) -> bool:
    return not core.scheduler.requests


@bug(
    "last-node",
    "gateways change the role of the last node that has it",
    25,
    RoleBalance,
    "_spare",
    seed=1,
    scenario=make_auto_scenario,
)
def _(spare: Wrong, balance: RoleBalance, nodes: Sequence[RoleLoad], role: str) -> bool:
    return True
