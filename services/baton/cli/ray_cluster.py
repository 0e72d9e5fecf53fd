"""A Ray cluster: connecting to it, what is free there, and reserved resources for workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from baton.rpc.address import split_address
from baton.rpc.errors import failed_precondition, invalid, unavailable

CONNECT_SECONDS = 5.0
PLACE_SECONDS = 20.0
"""Ray has room in total, and so places a worker at once, unless no single host has enough."""
CALLS = 8
"""Calls of an actor at a time."""

Bundle = Mapping[str, float]
"""CPUs and GPUs of a worker, on one host."""


def resources_text(resources: Bundle) -> str:
    """ "2 CPUs and 2 GPUs"."""
    return " and ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if name in resources)


def connect(address: str) -> RayCluster:
    """address: host:port of the head, or "auto": that of RAY_ADDRESS, or the cluster that this machine is a
    part of. Raises BatonError."""
    if address.startswith("ray://"):
        raise invalid(
            "ray", "--ray: run this on a host of the cluster, with the head's HOST:PORT, not ray://"
        )
    if address != "auto":
        try:
            socket.create_connection(split_address(address), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise unavailable(f"no Ray cluster at {address}: {error}; start one with 'ray start'") from None
    try:
        # Ray's workers import from the driver's current directory, where anybody may have put modules.
        with contextlib.chdir("/"):
            ray.init(
                address,
                namespace=f"baton-{secrets.token_hex(4)}",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError, AssertionError, RayError) as error:
        why = " ".join(str(error).split())
        hint = "start one with 'ray start --head', or name its head: --ray HOST:PORT"
        raise unavailable(f"no Ray cluster can be used from here: {why}; {hint}") from None
    context = ray.get_runtime_context()
    return RayCluster(context.gcs_address, context.get_node_id(), bool(ray.cluster_resources().get("GPU")))


@dataclasses.dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster that this process is connected to, as a driver of Ray's: what it has placed ends with it."""

    address: str
    """host:port of the head."""
    node: str
    """Ray's id of this host."""
    gpus: bool
    """Whether any host has GPUs."""

    def bundle(self, role: str, settings: Mapping[str, Any]) -> dict[str, float]:
        """What one worker with these settings reserves: for each rank a GPU where there are any and the
        device is not the CPU, and one CPU beside it; else as many CPUs as threads. Raises BatonError for a
        device that cannot be reserved."""
        device, ranks = str(settings.get("device", "auto")), float(settings.get("tp", 1))
        if ":" in device:
            raise invalid("device", f"--device {device}: Ray chooses the GPUs; use --device cuda")
        if device == "cuda" and not self.gpus:
            raise invalid(
                "device", f"--device cuda: no host of the Ray cluster {self.address} has a GPU; use cpu"
            )
        if self.gpus and device != "cpu":
            return {"CPU": ranks, "GPU": ranks}
        return {"CPU": ranks * float(settings.get("threads") or 1)}

    async def place(self, bundles: Mapping[str, Bundle]) -> dict[str, PlacementGroup]:
        """Worker -> its placement group, which Ray moves when its host dies: one bundle each, so that all
        ranks are on one host; Ray prefers the host with the most room, and so spreads workers. Raises
        BatonError that says what is needed and what is free; then nothing is reserved."""
        needed = {kind: sum(each.get(kind, 0) for each in bundles.values()) for kind in ("CPU", "GPU")}
        found = await asyncio.to_thread(ray.available_resources)
        free = {kind: found.get(kind, 0) for kind, count in needed.items() if count}
        if any(needed[kind] > count for kind, count in free.items()):
            raise failed_precondition(
                f"{len(bundles)} workers need {resources_text({kind: needed[kind] for kind in free})}, and "
                f"the Ray cluster {self.address} has {resources_text(free)} free: add hosts, or lower --tp, "
                "--prefill or --decode"
            )
        groups = {
            name: placement_group([dict(each)], strategy="STRICT_PACK") for name, each in bundles.items()
        }
        placed = await asyncio.gather(*(asyncio.to_thread(g.wait, PLACE_SECONDS) for g in groups.values()))
        unplaced = [name for name, fits in zip(groups, placed, strict=True) if not fits]
        if unplaced:
            release(list(groups.values()))
            raise failed_precondition(
                f"no host of the Ray cluster {self.address} has {resources_text(bundles[unplaced[0]])} free "
                f"for {', '.join(unplaced)}: a worker's ranks share a host; lower --tp, or add larger hosts"
            )
        return groups

    def create(
        self, actor: type, name: str, start: int, group: PlacementGroup | None, *arguments: Any
    ) -> Any:
        """A handle to a new actor. start: 1: the first of that name; Ray gives no name twice. group: None: on
        this host, with nothing reserved."""
        settings: dict[str, Any] = {"num_cpus": 0}
        if group is None:
            settings["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node, soft=False)
        else:
            bundle = group.bundle_specs[0]
            settings |= {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
            settings["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, 0)
        remote: Any = ray.remote(actor)
        settings |= {
            "name": name if start == 1 else f"{name}.{start}",
            "max_concurrency": CALLS,
            "max_restarts": 0,
        }
        return remote.options(**settings).remote(name, *arguments)

    def close(self) -> None:
        """Ends all actors and gives back all placement groups."""
        ray.shutdown()


def release(groups: Sequence[PlacementGroup | None]) -> None:
    """Gives back what was reserved. Idempotent."""
    for group in groups:
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
