"""What a command needs of its surroundings: a home, a current directory, files of its own."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import resource
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

CLIENT_VARIABLES = {"BATON_API_KEY", "BATON_CONFIG", "BATON_SERVER", "BATON_TLS_CA"}
"""Those that are no field of a process."""
LEAST_FILE_BYTES = 32 * 2**20
"""A log becomes as long before it is rotated, and more."""


def private_folder(path: Path) -> Path:
    """The folder, made if it is not there. Raises OSError if others can enter it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700, parents=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise PermissionError(
            f"{path} must be a folder of this user that nobody else can enter: remove it, or chmod 700 it"
        )
    return path


def temporary_folder(name: str) -> Path:
    """A private folder of this user in the system's folder for temporary files. Raises OSError."""
    return private_folder(Path(tempfile.gettempdir(), f"baton-{name}{os.geteuid()}"))


def unknown_variables() -> Iterator[str]:
    """A line for each variable BATON_... of the environment that sets nothing."""
    names = {name for name in os.environ if name.startswith("BATON_")} - CLIENT_VARIABLES
    # Kubernetes sets some for each service whose name begins so, and tests have theirs.
    strange = {name for name in names if not re.search(r"_SERVICE_|_PORT_\d|_PORT$|^BATON_TEST_", name)}
    if not strange:
        return
    from baton.cli.config_fields import variables  # here: it takes tens of milliseconds

    known = variables() | CLIENT_VARIABLES
    parts = sorted(name.removeprefix("BATON_") for name in known)
    for name in sorted(strange - known):
        nearest = difflib.get_close_matches(name.removeprefix("BATON_"), parts, 1)
        hint = "".join(f"; did you mean BATON_{part}?" for part in nearest)
        yield f"{name} is no variable of Baton's{hint}"


def check() -> None:
    """Raises OSError with one line that says what to do. Where a user has neither HOME nor an entry in
    passwd, HOME becomes a temporary folder: libraries keep their caches there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise FileNotFoundError("the current directory is not there any more: go to another one") from None
    os.umask(mask := os.umask(0o077))
    if mask & 0o700:
        raise PermissionError(
            f"umask {mask:03o} keeps this user from its own files: set another, such as 022"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit < LEAST_FILE_BYTES:
        least = LEAST_FILE_BYTES // 1024
        raise OSError(
            f"no file may have more than {limit} bytes here: allow {least} KiB at least (ulimit -f)"
        )
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(temporary_folder("home-"))
