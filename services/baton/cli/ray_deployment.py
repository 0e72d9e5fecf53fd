"""A deployment on the hosts of a Ray cluster; its workers' number changes while it serves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.local_secret import LocalSecret
from baton.cli.ray_child import RayChild
from baton.cli.ray_cluster import RayCluster
from baton.cli.scale import ScaleServer
from baton.cli.supervisor import Child, ChildError, ChildState
from baton.discovery.address_file import PREFIX
from baton.rpc.errors import failed_precondition

WORKERS = ("prefill", "decode", "encode")
LISTED = (ChildState.HEALTHY, ChildState.STOPPING)
"""States of workers that gateways are told of."""


class RayDeployment(Deployment):
    """Tokenizer and gateways run on this host, workers where Ray places them.

    Gateways find workers in files that this writes: one for each role, beside the logs. Nothing of Ray is
    asked while requests are served."""

    def __init__(self, plan: DeploymentPlan, console: Console, cluster: RayCluster) -> None:
        """Raises BatonError as Deployment does."""
        self._cluster = cluster
        self._scaling = asyncio.Lock()
        self._server: ScaleServer | None = None
        self._in_clear = not plan.settings.get("gateway", {}).get("cluster_cert")
        super().__init__(dataclasses.replace(plan, program=()), console)

    def _make_child(self, name: str, role: str, **where: Any) -> Child:
        if role in WORKERS:
            where = {}
        return RayChild(
            name,
            role,
            folder=self.log_folder,
            cluster=self._cluster,
            group=None,
            changed=self._write_lists,
            report=self._report,
            **where,
        )

    def _choose_gpus(self, workers: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Ray does."""
        return {}

    def _list(self, role: str) -> Path:
        return self.log_folder.absolute() / f"{role}.nodes"

    def _write_lists(self) -> None:
        for role in WORKERS:
            nodes = [each for each in self.children if each.role == role and each.state in LISTED]
            path, text = self._list(role), "".join(f"{each.address}\n" for each in nodes)
            if not path.exists() or path.read_text() != text:
                new = path.with_suffix(".new")
                new.write_text(text)
                new.replace(path)

    def _addresses(self, role: str) -> tuple[str, ...]:
        return (f"{PREFIX}{self._list(role)}",) if role in WORKERS else super()._addresses(role)

    def _settings(self, child: Child) -> dict[str, Any]:
        settings = super()._settings(child)
        if child.role == "decode":
            settings["prefill"] = ()  # the gateway names them with each request
        if self._secret is not None:
            del settings["cluster_secret_file"]  # which its actor makes
            settings["cluster_secret_in_clear"] = self._in_clear
        if child.role in WORKERS and "GPU" not in self._bundle(child.role):
            settings["threads"] = settings.get("threads") or 1
        return settings

    def _bundle(self, role: str) -> dict[str, float]:
        return self._cluster.bundle(role, self.plan.settings.get(role, {}))

    async def _prepare(self, children: Sequence[Child]) -> None:
        """Reserves workers' resources, and gives all the secret. Raises BatonError."""
        bundles = {each.name: self._bundle(each.role) for each in children if each.role in WORKERS}
        groups = await self._cluster.place(bundles)
        for each in children:
            assert isinstance(each, RayChild)
            each.group = groups.get(each.name)
            each.secret = self._secret.text if self._secret is not None else ""

    def _make_secret(self) -> LocalSecret:
        return LocalSecret(self.address, self._in_clear)

    async def _start(self) -> None:
        await self._prepare(self.children)
        self._write_lists()
        await super()._start()
        self._server = await ScaleServer.start(self.address, self.scale)

    async def _close(self) -> None:
        if self._server is not None:
            await self._server.close()
        try:
            await super()._close()
        finally:
            for role in WORKERS:
                self._list(role).unlink(missing_ok=True)
            await asyncio.to_thread(self._cluster.close)

    async def scale(self, nodes: Mapping[str, int]) -> str:
        """Starts or stops workers until there are as many of each role; returns what has changed, as text.
        One that stops ends its requests or hands them back first, within `drain_seconds`. Raises BatonError;
        workers that were started before the failure stay."""
        if self._scaling.locked():
            raise failed_precondition("another 'baton scale' is under way: wait for its end")
        async with self._scaling:
            said = []
            for role, count in nodes.items():
                before = [each for each in self.children if each.role == role]
                named = {each.name for each in before}
                free = (name for n in range(len(before) + count) if (name := f"{role}-{n}") not in named)
                more = [self._make_child(next(free), role) for _ in range(count - len(before))]
                await self._prepare(more)
                await self._grow(more)
                await asyncio.gather(*(self._shrink(each) for each in before[count:]))
                said.append(f"{role}: {len(before)} -> {count}")
            return ", ".join(said)

    async def _grow(self, more: list[Child]) -> None:
        results = await asyncio.gather(*(self._add(each) for each in more), return_exceptions=True)
        for result in results:
            if isinstance(result, ChildError):
                raise failed_precondition(" / ".join(str(result).splitlines()))
            if isinstance(result, BaseException):
                raise result

    async def _add(self, child: Child) -> None:
        await self.supervisor.add(child)
        self._report(f"{child.name} is healthy: pid {child.pid}, {child.address}")

    async def _shrink(self, child: Child) -> None:
        await self.supervisor.remove(child)
        self._report(f"{child.name} has stopped")
