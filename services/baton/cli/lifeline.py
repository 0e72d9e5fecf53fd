"""A child process must not outlive its supervisor, however that one ends.

The supervisor holds the write end of the child's standard input and never writes. When the supervisor is
gone, even by SIGKILL, the kernel closes that end and the child reads the end of the file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

GRACE_SECONDS = 5.0
"""From the supervisor's end to SIGKILL; before that SIGTERM, so that shared memory is removed."""


def hold_lifeline(grace_seconds: float = GRACE_SECONDS) -> None:
    """Ends this process when its standard input ends. Returns at once."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
