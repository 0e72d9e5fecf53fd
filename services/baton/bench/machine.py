"""The machine, its GPUs, and the versions, as results name them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import baton
from baton.cgroups import processor

PACKAGES = ("grpcio", "protobuf", "uvloop", "torch", "transformers", "triton", "sglang-kernel", "nixl")
DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Devices of NVIDIA drivers; the second is WSL's."""
SECONDS = 10.0
"""Time limit of a program."""


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * size / 2**30, 1),
        "gpus": _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    }


def versions(commit: str = "") -> dict[str, str]:
    """Versions of Baton, Python and the installed ones of PACKAGES. commit: instead of the checkout's."""
    found = {"baton": baton.__version__, "commit": commit or _commit(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Commit of this package's checkout, with "+" if files are changed; "unknown" if there is none."""
    root = Path(baton.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    head = _lines("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    changed = _lines("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return head[0] + ("+" if changed else "")


def _lines(program: str, *arguments: str) -> list[str]:
    """Lines that a program prints; none if it is missing or fails."""
    if shutil.which(program) is None:
        return []
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them. Imports torch only if there is a
    driver."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        # CUDA ignores "-1" and what follows it.
        return names[: names.index("-1")] if "-1" in names else names
    if not any(path.exists() for path in DRIVER):
        return []
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
