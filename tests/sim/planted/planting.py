"""How a bug is planted into the real core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from baton.sim.scenario import Scenario, make_scenario

Wrong = Callable[..., Any]
"""Replaces a method: called with the method, then with its arguments."""
PlantedChange = tuple[type | ModuleType, str, Wrong]
"""The class and the name of the method, or a module and its function, and what replaces it."""


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    text: str
    """What is wrong, in one line."""
    within: int
    """A run of this many seeds, from 0 on, finds it, with some margin."""
    seed: int
    """One that found it, to be tried first."""
    changes: tuple[PlantedChange, ...]
    scenario: Callable[[int], Scenario] = make_scenario
    """Of a seed."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The core has it until the block ends."""
        with ExitStack() as stack:
            for owner, method, wrong in self.changes:
                original = getattr(owner, method)
                setattr(owner, method, _bound(wrong, original))
                stack.callback(setattr, owner, method, original)
            yield


def _bound(wrong: Wrong, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: wrong(original, *arguments, **named)


BUGS: dict[str, Bug] = {}


def bug(
    name: str,
    text: str,
    within: int,
    owner: type | ModuleType,
    method: str,
    *others: PlantedChange,
    seed: int = 0,
    scenario: Callable[[int], Scenario] = make_scenario,
) -> Callable[[Wrong], Wrong]:
    """Registers what it decorates as the bug's first change."""

    def register(wrong: Wrong) -> Wrong:
        BUGS[name] = Bug(name, text, within, seed, ((owner, method, wrong), *others), scenario)
        return wrong

    return register


def planted(name: str) -> AbstractContextManager[None]:
    """Plants the named bug; an empty name plants none. Raises KeyError for an unknown name."""
    return BUGS[name].planted() if name else nullcontext()
