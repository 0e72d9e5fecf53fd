"""Files that hold a secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from baton.rpc.errors import BatonError, failed_precondition

MAX_BYTES = 2**20


def read_private(path: str, flag: str) -> bytes:
    """The content of a file that not everybody may read. Raises BatonError, which names `flag`."""
    descriptor = _open(path, flag)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and about.st_mode & stat.S_IRWXO:
            raise _unusable(f"{flag}: every user of this machine can read {path}; chmod 600 {path}")
        return _bounded(file.read(MAX_BYTES + 1), path, flag)


def read_public(path: str, flag: str) -> bytes:
    """The content of a file such as a certificate. Raises BatonError, which names `flag`."""
    with os.fdopen(_open(path, flag), "rb") as file:
        return _bounded(file.read(MAX_BYTES + 1), path, flag)


def write_private(path: Path, content: bytes) -> int:
    """Makes the file, readable by its user only; it must not be there yet. Returns it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.write(descriptor, content)
    return descriptor


def _open(path: str, flag: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(f"{flag}: cannot read {path}: {error.strerror}") from None


def _bounded(content: bytes, path: str, flag: str) -> bytes:
    if len(content) > MAX_BYTES:
        raise _unusable(f"{flag}: {path} has more than {MAX_BYTES} bytes")
    return content


def _unusable(message: str) -> BatonError:
    return failed_precondition(message, "UNUSABLE_FILE")
