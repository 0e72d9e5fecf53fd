"""Processes that a forked `baton up` has forked in advance, before it has threads: its children.

Each waits until the supervisor starts it; then it has the standard streams, environment, process group and
arguments that an executed one would have, and is the supervisor's own child. One that is not needed ends with
the command.
"""

from __future__ import annotations

import asyncio.unix_events
import atexit
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

COMMANDS = ("up", "verify", "demo")
SPARES = 8
"""Of each command, for children and restarts; further ones are executed."""
MOST_BYTES = 1 << 20

Become = Callable[[list[str], dict[str, str], str, list[int]], None]


def _end(spares: list[tuple[int, socket.socket]]) -> None:
    """As they are children, whoever looks for what is left behind would find them."""
    for _, spare in spares:
        spare.close()
    for pid, _ in spares:
        os.waitpid(pid, 0)


def prepare(arguments: Sequence[str], become: Become) -> None:
    """Of a command that gets these arguments."""
    if arguments[0] not in COMMANDS and not (arguments[0] == "bench" and "--model" in arguments):
        return
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(SPARES):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            try:
                for _, other in [*spares, (0, ours)]:
                    other.close()
                message, descriptors, _, _ = socket.recv_fds(theirs, MOST_BYTES, 3)
                if message:
                    theirs.close()
                    os.setpgid(0, 0)
                    asked = json.loads(message)
                    become(asked["arguments"], asked["environment"], "", descriptors)
            finally:
                os._exit(0)
        theirs.close()
        spares.append((pid, ours))
    atexit.register(_end, spares)

    class Child(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, args: Sequence[str], **options: Any) -> None:
            if not spares or "serve" not in args:
                super().__init__(args, **options)
                return
            self._start(list(args)[list(args).index("serve") :], **options)

        def _start(
            self, arguments: list[str], *, stderr: IO[bytes], env: Mapping[str, str], **_: Any
        ) -> None:
            """With a pipe at its standard input and output each, as the supervisor asks for."""
            self.pid, spare = spares.pop(0)
            self.args, self.returncode = arguments, None
            self._waitpid_lock, self._child_created = threading.Lock(), True
            (stdin, our_stdin), (our_stdout, stdout) = os.pipe(), os.pipe()
            message = json.dumps({"arguments": arguments, "environment": dict(env)}).encode()
            with spare:
                socket.send_fds(spare, [message], [stdin, stdout, stderr.fileno()])
            os.close(stdin)
            os.close(stdout)
            self.stdin, self.stdout = os.fdopen(our_stdin, "wb", 0), os.fdopen(our_stdout, "rb", 0)
            self.stderr = None

    asyncio.unix_events.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=Child, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL
    )
