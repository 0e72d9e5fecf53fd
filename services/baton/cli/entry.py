"""`python -m baton.cli.entry COMMAND...`: the first process of a container.

It starts the command under a process id that no other container of the network uses, hands signals on to it,
collects what dies, and exits as the command did. The id matters to CUDA IPC: it refuses memory of a process
that has our own id in another PID namespace, and left alone, each container's command has id 1.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import signal
import socket
import sys

FIRST_ID = 100
IDS = 1024
"""Ids are chosen from FIRST_ID on, so many of them: an id is reached by forking, some 0.3 ms each."""


def own_address() -> str:
    """What the container's host name stands for; "" for none, or one of the loopback."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address


def choose_id(address: str, draw: int) -> int:
    """The id for the container with this address: containers of one network differ in the last bits of
    theirs. Without an address it is left to chance, which is `draw`."""
    number = int(ipaddress.ip_address(address)) if address else draw
    return FIRST_ID + number % IDS


def use_up_ids(wanted: int, limit: int = 2 * IDS) -> None:
    """Makes `wanted` the next process id, if ids are handed out in turn and it has not been passed yet."""
    for _ in range(limit):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        if child >= wanted - 1:
            return


def run(command: list[str]) -> int:
    """Runs the command to its end. Returns its exit code; 128 and the signal's number if one ended it."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    # Before there is a child: what arrives from now on waits, and none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*signals, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"baton: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    while True:
        received = signal.sigwait({*signals, signal.SIGCHLD})
        if received != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, received)
        elif (code := _collect(child)) is not None:
            return code


def _collect(main: int) -> int | None:
    """Takes leave of all that have died; `main`'s exit code if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == main:
            ending = os.waitstatus_to_exitcode(status)
            code = ending if ending >= 0 else 128 - ending


def main() -> None:
    if len(sys.argv) < 2:
        print("baton: give the command to run, such as: baton serve decode", file=sys.stderr)
        sys.exit(2)
    if os.getpid() == 1:  # else the ids are not this container's own
        use_up_ids(choose_id(own_address(), random.randrange(IDS)))
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
