"""tests/last_run.txt: the commit of the last whole run that passed, and what each test file took then.

`make test-all` writes it, for the order of files in lanes (tests/lanes.py) and for `.ci/run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

NAME = "tests/last_run.txt"
HEAD = "# Written by `make test-all`. The commit; then a test file a line: seconds, seconds of processors.\n"


class Times(NamedTuple):
    """Seconds."""

    wall: float
    processors: float

    def plus(self, other: Times) -> Times:
        return Times(self.wall + other.wall, self.processors + other.processors)


class LastRun(NamedTuple):
    commit: str
    """Empty: none is known."""
    files: Mapping[str, Times]
    """By their paths from the repository's root."""


def file_of(nodeid: str) -> str:
    """The path of a test's file, from the repository's root."""
    return nodeid.partition("::")[0]


def read(root: Path) -> LastRun:
    """Nothing where there is no file."""
    commit, files, path = "", {}, root / NAME
    for line in path.read_text().splitlines() if path.exists() else ():
        match line.split():
            case ["commit", name]:
                commit = name
            case [name, wall, processors]:
                files[name] = Times(float(wall), float(processors))
    return LastRun(commit, files)


def write(root: Path, run: LastRun) -> None:
    lines = [
        f"{name} {times.wall:.1f} {times.processors:.1f}\n"
        for name, times in sorted(run.files.items())
        if (root / name).exists()
    ]
    head = [HEAD, f"commit {run.commit}\n" if run.commit else ""]
    (root / NAME).write_text("".join(head + lines))
