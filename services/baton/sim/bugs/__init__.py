"""Classic bugs of split serving, to be planted into the real core one at a time: the proof that the simulator
bites. `planted` puts one in for as long as a block runs; nothing outside the simulator imports this."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from baton.sim.bugs.leases import LEASE_BUGS
from baton.sim.bugs.patching import Bug
from baton.sim.bugs.pulls import PULL_BUGS
from baton.sim.bugs.resumes import RESUME_BUGS
from baton.sim.bugs.steps import STEP_BUGS

BUGS: dict[str, Bug] = {bug.name: bug for bug in (*LEASE_BUGS, *PULL_BUGS, *STEP_BUGS, *RESUME_BUGS)}

__all__ = ["BUGS", "Bug", "planted"]


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants the bug of that name; an empty name plants none. Raises KeyError for an unknown one."""
    originals: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, attribute)
        originals.append((owner, attribute, original))
        setattr(owner, attribute, make(original))

    if name:
        BUGS[name].plant(patch)
    try:
        yield
    finally:
        for owner, attribute, original in reversed(originals):
            setattr(owner, attribute, original)
