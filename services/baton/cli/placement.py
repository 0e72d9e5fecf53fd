"""Which worker of a deployment gets which GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.cli.toml import read_config
from baton.config import WorkerConfig

DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU, and what the worker's process is started with so that it sees that one alone."""

    gpu: str
    """As CUDA_VISIBLE_DEVICES names it."""
    sharing: int
    """Workers on it."""

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": self.gpu}

    def flags(self, given: bool) -> tuple[str, ...]:
        """Workers that share a GPU share its memory; `given`: somebody has said how much each may take."""
        if given or self.sharing == 1:
            return ()
        return ("--memory-fraction", f"{WorkerConfig().memory_fraction / self.sharing:.3f}")


def place(workers: Sequence[str], gpus: Sequence[str]) -> dict[str, Place]:
    """Worker -> its place: in turn over the GPUs, so that neighbours lie apart. Empty without GPUs."""
    if not gpus:
        return {}
    turn = [gpus[number % len(gpus)] for number in range(len(workers))]
    return {name: Place(gpu, turn.count(gpu)) for name, gpu in zip(workers, turn, strict=True)}


def wants_gpu(flags: Sequence[str], role: str) -> bool:
    """Whether workers with these flags take any GPU that they see; one that names its own keeps it."""
    return value_of(flags, role, "device") in ("cuda", "auto", None)


def value_of(flags: Sequence[str], role: str, name: str) -> str | None:
    """What a worker's flags, or the file that they name, say about an option; None: nothing."""
    flag = "--" + name.replace("_", "-")
    if flag in flags:
        return flags[len(flags) - flags[::-1].index(flag)]
    if "--config" in flags:
        values = read_config(Path(flags[flags.index("--config") + 1]), role)
        return str(values[name]) if name in values else None
    return None


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES would name them. Imports torch only where
    there is a driver."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        # What follows a number that is none of a device is not seen either.
        return names[: names.index("-1")] if "-1" in names else names
    if not any(path.exists() for path in DRIVER):
        return []
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
