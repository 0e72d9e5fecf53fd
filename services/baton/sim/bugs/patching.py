"""How a bug is planted: one attribute of a class or module replaced, and put back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Patch = Callable[[Any, str, Callable[[Any], Any]], None]
"""(owner, attribute, make): make(original) takes the attribute's place."""


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    text: str
    """What is wrong, in one line."""
    within: int
    """A run of so many seeds, from 0 on, finds it; with some room above what it took when written."""
    plant: Callable[[Patch], None]
