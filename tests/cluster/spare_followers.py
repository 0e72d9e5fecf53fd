"""Followers that a forked worker has forked in advance, before it has threads, instead of executing Python.

Each waits until `Followers` starts it; then it has the descriptors, process group and name that an executed
one would have, and runs the same `main`. One that is not needed ends with its worker.
"""

from __future__ import annotations

import array
import os
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAME = "follower"
"""Of the process, once it is one."""


def prepare(arguments: list[str]) -> None:
    """Of a worker that gets these arguments."""
    ranks = int(arguments[arguments.index("--tp") + 1]) if "--tp" in arguments else 1
    if ranks == 1:
        return
    import baton.worker.ranks.follower
    import baton.worker.ranks.follower_main
    import baton.worker.ranks.followers
    import baton.worker.ranks.hosts

    spares: list[tuple[int, socket.socket]] = []
    for _ in range(ranks):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            for _, other in [*spares, (0, ours)]:
                other.close()
            os._exit(become(theirs))
        theirs.close()
        spares.append((pid, ours))

    class Follower(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
            self.pid, spare = spares.pop(0)
            self.args, self.returncode = command, None
            self.stdin = self.stdout = self.stderr = None
            self._waitpid_lock, self._child_created = threading.Lock(), True
            with spare:
                message = array.array("i", [int(command[-1]), *pass_fds]).tobytes()
                socket.send_fds(spare, [message], pass_fds)

    baton.worker.ranks.followers.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=Follower, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def become(asked: socket.socket) -> int:
    """The exit code. The message: its argument, then the numbers that the descriptors have there."""
    message, given, _, _ = socket.recv_fds(asked, 1024, 8)
    if not message:
        return 0
    asked.close()
    argument, *wanted = array.array("i", message)
    # Out of the way: none of them may have a number that another one is to get.
    held = [(os.dup(one) if one in wanted else one) for one in given]
    for one, number in zip(held, wanted, strict=True):
        os.dup2(one, number)
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    Path("/proc/self/comm").write_text(NAME)
    from baton.worker.ranks.follower_main import main

    try:
        return main(argument)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
