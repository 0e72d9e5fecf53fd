"""Secrets of the deployments that `baton up` runs here, where only their user can read them.

A folder of the user's own holds a file for each deployment and, once its gateway listens, a second name for
it: the gateway's port. So `baton status` and its kin find it. Whoever uses the file holds its lock; files
without one are left over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
from pathlib import Path

from baton.rpc.address import is_loopback
from baton.rpc.authentication import read_secret, write_private
from baton.rpc.errors import BatonError, failed_precondition

SUFFIX = ".secret"
ATTEMPTS = 10


def folder() -> Path:
    """Made if it is not there. Raises BatonError when it is not this user's alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(runtime, "baton") if runtime else Path(tempfile.gettempdir(), f"baton-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700, parents=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise failed_precondition(
            f"{path} must be a folder of this user that nobody else can enter: remove it, or chmod 700 it"
        )
    return path


class LocalSecret:
    """Drawn for one deployment; gone with `close`."""

    def __init__(self) -> None:
        """Raises BatonError."""
        where = folder()
        _reap(where)
        self.path, self._descriptor = _create_locked(where)
        self._named: Path | None = None

    def name(self, port: int) -> None:
        """From now on `find` knows it, by the port of the deployment's gateway."""
        named = self.path.with_name(f"{port}{SUFFIX}")
        named.unlink(missing_ok=True)  # of a gateway that is gone: the port is ours
        named.hardlink_to(self.path)
        self._named = named

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor < 0:
            return
        # By now another deployment may have the port, and the name.
        if self._named is not None and self._named.exists() and self._named.samefile(self.path):
            self._named.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


def _create_locked(where: Path) -> tuple[Path, int]:
    for _ in range(ATTEMPTS):
        path = where / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        descriptor = write_private(path, secrets.token_hex(32).encode())
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # before it was locked, somebody who starts too took it for left over
    raise failed_precondition(f"no secret can be kept in {where}: files disappear there")


def find(address: str) -> str:
    """The secret of the deployment that this user runs here with the gateway at host:port; empty: there is
    none. Another machine's is never looked for: it would be told a secret that is not its own."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not is_loopback(host):
        return ""
    try:
        return read_secret(str(folder() / f"{port}{SUFFIX}"))
    except (BatonError, OSError):
        return ""


def _reap(where: Path) -> None:
    """Removes what deployments left that were killed."""
    for path in where.glob(f"*{SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        os.close(descriptor)
