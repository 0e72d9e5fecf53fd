"""What --auto-roles makes of the loads that workers report, and when it leaves them alone."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from baton.config import GatewayConfig
from baton.gateway.auto_roles import AutoRoles
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.role_balance import RoleBounds
from baton.gateway.routing import Router
from baton.rpc.errors import BatonError
from baton.rpc.logs import get_logger
from baton.v1 import cache_pb2, node_pb2


class Gateway:
    """With one prefill node, where prompts wait, and three decode nodes. Changes of role are refused."""

    log = get_logger()

    def __init__(self):
        self.now, self.changes, self.draining = 0.0, [], set()
        self.router = Router("cache", lambda: self.now)
        info = node_pb2.NodeInfo()
        decode = {f"h:{n}": SimpleNamespace(usable=True, leaving=False, info=info) for n in (1, 2, 3)}
        self.nodes = SimpleNamespace(prefill=["h:0"], decode=decode)
        metrics = GatewayMetrics()
        bounds = RoleBounds(lasting=10, pause=60)
        self.roles = AutoRoles(GatewayConfig(), self.nodes, self.router, self, metrics, bounds)
        self.roles.start()

    def clock(self):
        return self.now

    def after(self, seconds, call):
        self.look = call

    def spawn(self, work, name):
        if name.startswith("role"):
            self.changes.append((self.now, name))
            with pytest.raises(StopIteration):
                work.send(None)
        else:
            work.close()

    async def set_role(self, address, role, seconds):
        raise BatonError(grpc.StatusCode.ABORTED, "STILL_BUSY", "something did not end")

    def run(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            for address in ("h:0", *self.nodes.decode):
                load = node_pb2.Load(draining=address in self.draining, prompt_tokens_per_second=1000)
                load.queued_tokens = 0 if address in self.nodes.decode else 9000
                load.pages.total = 80
                update = cache_pb2.CacheUpdate(incarnation=1, snapshot=True, page_size=16, load=load)
                self.router.update(address, update)
            self.look()


def say(node):
    """On its stream, before it reports its load."""
    node.leaving, node.usable = not node.leaving, not node.usable


@pytest.mark.parametrize("by_stream", [False, True])
@pytest.mark.parametrize("after", [5, 10])
def test_while_a_node_drains_no_other_one_changes_its_role(after, by_stream):
    """Another gateway, or a person, is changing its role: what it begins must not be made twice."""
    gateway = Gateway()
    gateway.run(after)
    if by_stream:
        say(gateway.nodes.decode["h:3"])
    else:
        gateway.draining = {"h:3"}
    gateway.run(15)
    assert not gateway.changes
    if by_stream:
        say(gateway.nodes.decode["h:3"])
    gateway.draining.clear()
    gateway.run(11)
    assert gateway.changes == [(after + 26.0, "role of h:3")], "what waits has to last anew"


def test_a_node_that_drains_for_good_hinders_no_change():
    gateway = Gateway()
    gateway.draining = {"h:3"}
    gateway.run(50)
    assert gateway.changes[0] == (41.0, "role of h:2")


def test_a_node_that_refuses_is_left_alone_for_others():
    gateway = Gateway()
    gateway.run(80)
    assert gateway.changes == [(11.0, "role of h:3"), (71.0, "role of h:2")]
