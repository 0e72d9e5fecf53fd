"""Random names of processes."""

from __future__ import annotations

import secrets


def new_incarnation() -> int:
    """Draws a process's name for its lifetime: 1 <= x < 2**64, never 0."""
    return secrets.randbelow(2**64 - 1) + 1
