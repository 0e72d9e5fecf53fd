"""Reads and writes files that hold secrets and certificates."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from baton.rpc.errors import BatonError, failed_precondition

MAX_BYTES = 2**20
MIN_SECRET_CHARACTERS = 16


def read_private(path: str, flag: str) -> bytes:
    """The content of a private file. Raises BatonError naming `flag`, also if every user can read the
    file."""
    return _read(path, flag, private=True)


def read_public(path: str, flag: str) -> bytes:
    """The content of a public file such as a certificate. Raises BatonError naming `flag`."""
    return _read(path, flag, private=False)


def write_private(path: Path, content: bytes) -> int:
    """Creates the file, readable by its user only; it must not exist. Returns it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.write(descriptor, content)
    return descriptor


def _read(path: str, flag: str, private: bool) -> bytes:
    try:
        with Path(path).open("rb") as file:
            about = os.fstat(file.fileno())
            if private and stat.S_ISREG(about.st_mode) and about.st_mode & stat.S_IRWXO:
                raise _unusable(f"{flag}: every user of this machine can read {path}; chmod 600 {path}")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(f"{flag}: cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise _unusable(f"{flag}: {path} has more than {MAX_BYTES} bytes")
    return content


def _unusable(message: str) -> BatonError:
    return failed_precondition(message, "UNUSABLE_FILE")


def read_secret(path: str, flag: str = "--cluster-secret-file") -> str:
    """Raises BatonError if the file cannot be read, is readable by all users, or holds no secret."""
    secret = read_private(path, flag).decode("latin-1").strip()
    if len(secret) < MIN_SECRET_CHARACTERS or not (secret.isascii() and secret.isprintable()):
        raise failed_precondition(
            f"{flag}: {path} must hold one line of {MIN_SECRET_CHARACTERS} or more printable ASCII "
            f"characters; openssl rand -hex 32 > {path}",
            "UNUSABLE_FILE",
        )
    return secret
