"""Addresses in a file, a line each, read again when it changes: who writes it says which nodes there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from baton.rpc.address import split_address
from baton.rpc.errors import invalid
from baton.rpc.logs import get_logger

PREFIX = "file:"
REFRESH_SECONDS = 0.5

_log = get_logger()


def parse_path(text: str, field: str) -> Path:
    """From "file:/path". Raises BatonError that names the field."""
    path = Path(text.removeprefix(PREFIX))
    if not path.is_absolute():
        raise invalid(field, f"{text!r} names no file from the root on; write {PREFIX}/PATH")
    return path


def read(path: Path) -> list[str]:
    """host:port of all nodes, sorted. Raises OSError, and ValueError for a line that is no address."""
    addresses = {line.strip() for line in path.read_text().splitlines()} - {""}
    for address in addresses:
        split_address(address)
    return sorted(addresses)


async def watch(path: Path, changed: Callable[[list[str]], None]) -> None:
    """Calls `changed` with the file's addresses, at once and after each change, until cancelled. While it
    cannot be read, or has a line that is no address, nothing changes. Replace it by renaming another one:
    what is written in place may be read in part."""
    known: list[str] | None = None
    failing = False
    while True:
        try:
            found = read(path)
        except (OSError, ValueError) as error:
            if not failing:
                _log.warning("addresses not read", file=str(path), error=str(error))
            failing = True
        else:
            failing = False
            if found != known:
                known = found
                changed(found)
        await asyncio.sleep(REFRESH_SECONDS)
