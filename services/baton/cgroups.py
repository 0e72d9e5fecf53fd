"""Limits of the control groups that this process is in, of version 2 or 1: containers have them.

Groups are nested, and each may set limits: the tightest one counts. Where a container shows a process its
host's path, which it cannot see, the group at the root of the mount is its own.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC_SELF_CGROUP = Path("/proc/self/cgroup")
"""This process's group in each hierarchy, a line each: ID:CONTROLLERS:PATH."""


def memory(root: Path = ROOT, self_cgroup: Path = PROC_SELF_CGROUP) -> tuple[int, int] | None:
    """Bytes that may still be taken, and the limit, where the least may be; None: there is no limit."""
    found: list[tuple[int, int]] = []
    for group in _groups("memory", root, self_cgroup):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is None or used is None or limit > 2**60:  # version 1 says so: unlimited
            continue
        # Pages of files that were not used lately: the kernel takes them back before it kills.
        statistics = _pairs(group / "memory.stat")
        cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        found.append((max(0, limit - max(0, used - cached)), limit))
    return min(found, default=None)


def cores(root: Path = ROOT, self_cgroup: Path = PROC_SELF_CGROUP) -> int:
    """Processors that this process may use, by its affinity and its groups' quotas, which are rounded up."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu", root, self_cgroup):
        quota, period = _quota(group)
        if quota > 0 and period > 0:
            usable = min(usable, math.ceil(quota / period))
    return max(1, usable)


def oom_kills(root: Path = ROOT, self_cgroup: Path = PROC_SELF_CGROUP) -> int:
    """Processes of this process's group that were killed because memory ran out; 0 if that is not known."""
    for group in _groups("memory", root, self_cgroup):
        events = _pairs(group / "memory.events") or _pairs(group / "memory.oom_control")
        return events.get("oom_kill", 0)
    return 0


def _groups(controller: str, root: Path, self_cgroup: Path) -> Iterator[Path]:
    """Folders of the process's group and those that it is nested in, for a controller."""
    for line in _read(self_cgroup).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        base = root if not names else next((f for f in (root / controller, root / names) if f.is_dir()), None)
        if base is None:
            continue
        group = base / path.lstrip("/")
        if ".." in group.parts or not group.is_dir():
            group = base
        while True:
            yield group
            if group == base:
                break
            group = group.parent


def _quota(group: Path) -> tuple[int, int]:
    """Microseconds in each period, and the period; (0, 0): no quota."""
    words = _read(group / "cpu.max").split()
    if not words:
        words = [_read(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        quota, period = map(int, words)
    except ValueError:  # "max", or no such files
        return 0, 0
    return quota, period


def _number(*files: Path) -> int | None:
    """Number in the first file that has one."""
    for file in files:
        if (text := _read(file).strip()).isdecimal():
            return int(text)
    return None


def _pairs(file: Path) -> dict[str, int]:
    """Reads a file with a name and a number a line."""
    rows = (line.split() for line in _read(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def processor() -> str:
    """The name of this machine's processor; empty: it is not known."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()
