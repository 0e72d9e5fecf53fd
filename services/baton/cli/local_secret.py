"""Cluster secrets of the deployments that `baton up` runs on this machine, readable by their user only.

A folder of the user's own holds a file for each deployment, named after its gateway's port. `baton status`
and the other commands find it by that. The deployment holds the file's lock; files without one are stale.
The name also says whether processes on several hosts send it to each other without TLS.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from baton.authentication.private_files import read_secret, write_private
from baton.cli.surroundings import private_folder, temporary_folder
from baton.rpc.address import is_loopback, split_address
from baton.rpc.errors import BatonError, failed_precondition


def folder() -> Path:
    """Made if it is not there. Raises BatonError if others can enter it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        return private_folder(Path(runtime, "baton")) if runtime else temporary_folder("")
    except OSError as error:
        raise failed_precondition(str(error)) from None


def _file(address: str, in_clear: bool = False) -> Path:
    return folder() / f"{split_address(address)[1]}{'.in-clear' if in_clear else ''}.secret"


def scale_socket(address: str) -> Path:
    """Where the deployment with the gateway at host:port hears `baton scale`, if it can."""
    return folder() / f"{split_address(address)[1]}.scale"


class LocalSecret:
    """The secret of one deployment, removed by `close`."""

    def __init__(self, gateway: str, in_clear: bool = False) -> None:
        """gateway: host:port. Raises BatonError."""
        self.path = _file(gateway, in_clear)
        self.text = secrets.token_hex(32)
        with _locked(self.path.parent):
            for path in self.path.parent.glob("*.secret"):
                _remove_stale(path)
            if self.path.exists() or _file(gateway, not in_clear).exists():
                raise failed_precondition(f"a deployment of this user has {gateway}'s port; choose another")
            self._descriptor = write_private(self.path, self.text.encode())
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def find(address: str) -> tuple[str, bool]:
    """The secret of this user's deployment with the gateway at host:port, and whether it may be sent to its
    other hosts in clear; empty: there is none. Never for another machine's address, which would be sent a
    secret that is not its own."""
    for in_clear in (False, True):
        with contextlib.suppress(BatonError, OSError, ValueError):
            if is_loopback(split_address(address)[0]):
                return read_secret(str(_file(address, in_clear))), in_clear
    return "", False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    """Removes the file of a deployment that was killed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    os.close(descriptor)
