"""PID namespaces: which processes see each other's process ids."""

from __future__ import annotations

from pathlib import Path

FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The one that the system started with (PROC_PID_INIT_INO in Linux)."""


def pid_namespace() -> str:
    """An id that is equal for processes which see each other's process ids; "" if it cannot be read."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
