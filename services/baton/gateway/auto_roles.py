"""Changes roles of workers by their queues (--auto-roles): carries out what role_balance decides."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config import GatewayConfig
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.role_balance import RoleBalance, RoleBounds, RoleChange, RoleLoad
from baton.gateway.routing import Router
from baton.gateway.runtime import Cancellable, GatewayRuntime
from baton.gateway.worker_registry import WorkerRegistry
from baton.rpc.errors import BatonError
from baton.v1 import node_pb2

LOOK_SECONDS = 1.0
"""Nodes report as often, at least."""
END_SECONDS = 5.0
"""How long what runs at a node may go on before it is handed back, as of `baton role`."""
CHANGE_SECONDS = 30.0
"""A node that drains for longer does not change its role."""


class AutoRoles:
    """Looks at the workers that serve, and changes one at a time. Used on one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        nodes: WorkerRegistry,
        router: Router,
        runtime: GatewayRuntime,
        metrics: GatewayMetrics,
        bounds: RoleBounds | None = None,
        every: float = LOOK_SECONDS,
    ) -> None:
        """bounds: None: those of the configuration. every: seconds between two looks."""
        bounds = bounds or RoleBounds(
            config.least_prefill, config.least_decode, config.role_seconds, config.role_pause_seconds
        )
        self._every = every
        self._balance = RoleBalance(bounds)
        self._nodes = nodes
        self._router = router
        self._runtime = runtime
        self._metrics = metrics
        self._timer: Cancellable | None = None
        self._contexts: dict[str, tuple[int, int]] = {}
        """Prefill nodes: the incarnation that was asked, and the tokens that it holds of a request; 0: it has
        not answered."""
        self._changing = False
        self._draining: dict[str, float] = {}
        """Nodes that drain, and since when."""
        self._last: tuple[RoleChange, float] | None = None
        """The last change that was made, and when."""

    def start(self) -> None:
        self._timer = self._runtime.after(self._every, self._look)

    def close(self) -> None:
        """A change that is under way goes on at its node."""
        if self._timer is not None:
            self._timer.cancel()

    def last_change(self) -> node_pb2.RoleChange | None:
        """None: this gateway has made none."""
        if self._last is None:
            return None
        change, at = self._last
        age = round(1000 * (self._runtime.clock() - at))
        return node_pb2.RoleChange(address=change.address, to=change.to, why=change.why, age_ms=age)

    def _look(self) -> None:
        self.start()
        if self._changing or self._others_change(self._runtime.clock()):
            return
        change = self._balance.look(self._runtime.clock(), list(self._loads()))
        self._metrics.queue_seconds.labels("prompts").set(self._balance.queues.prompts)
        self._metrics.queue_seconds.labels("rows").set(self._balance.queues.rows)
        if change is not None:
            self._changing = True
            self._runtime.spawn(self._change(change), f"role of {change.address}")

    def _others_change(self, now: float) -> bool:
        """Whether a node may be changing its role, for another gateway or a person: it drains."""
        decode = self._nodes.decode
        loads = {a: self._router.view(a).fresh_load(now) for a in (*self._nodes.prefill, *decode)}
        draining = {a for a, load in loads.items() if load is not None and load.draining}
        draining |= {a for a, node in decode.items() if node.leaving}
        self._draining = {address: self._draining.get(address, now) for address in draining}
        return any(now - since < CHANGE_SECONDS for since in self._draining.values())

    async def _change(self, change: RoleChange) -> None:
        log, named = self._runtime.log, {"node": change.address, "to": change.to, "why": change.why}
        log.info("role is to change", **named)
        try:
            answer = await self._runtime.set_role(change.address, change.to, END_SECONDS)
        except BatonError as error:
            self._balance.failed(self._runtime.clock(), change.address)
            self._metrics.role_changes.labels(change.to, "failed").inc()
            log.warning("role not changed", **named, reason=error.reason, error=error.message)
        else:
            self._metrics.role_changes.labels(change.to, "changed").inc()
            self._last = change, self._runtime.clock()
            log.info("role changed", **named, handed_back=answer.handed_back, pause_ms=answer.pause_ms)
        finally:
            self._changing = False

    def _loads(self) -> Iterator[RoleLoad]:
        """Loads of the workers that serve and have reported lately."""
        decode = {address: node for address, node in self._nodes.decode.items() if node.usable}
        contexts = [node.info.model.context_length for node in decode.values() if node.info is not None]
        accepted = min(contexts, default=0)
        for role, addresses in (("prefill", self._nodes.prefill), ("decode", list(decode))):
            for address in addresses:
                view = self._router.view(address)
                load = view.fresh_load(self._runtime.clock())
                if load is None or load.draining or any(each.stops_serving for each in load.problems):
                    continue
                yield RoleLoad(
                    address,
                    role,
                    queued_tokens=load.queued_tokens,
                    prompt_rate=float(load.prompt_tokens_per_second),
                    wait=load.wait_ms / 1000,
                    running=load.running,
                    rows=load.rows,
                    context_tokens=load.keys,
                    pool_tokens=load.pages.total * view.page_size,
                    able=role == "decode" or accepted <= self._context(address),
                )

    def _context(self, address: str) -> int:
        """Tokens of prompt and output that a prefill node holds; 0: not known yet. A gateway accepts what
        each of its decode nodes can hold, so a smaller node must not become one."""
        incarnation = self._router.view(address).incarnation
        asked, context = self._contexts.get(address, (0, 0))
        if asked != incarnation:
            self._contexts[address], context = (incarnation, 0), 0
            self._runtime.spawn(self._ask(address, incarnation), f"context of {address}")
        return context

    async def _ask(self, address: str, incarnation: int) -> None:
        try:
            info = await self._runtime.node_info(address)
        except BatonError:
            self._contexts.pop(address, None)  # it is asked again
        else:
            self._contexts[address] = incarnation, info.model.context_length
