"""`python -m baton.cli.entrypoint COMMAND...`: the first process of a container.

It starts the command under a process id that no other container of the network uses, forwards signals, reaps
processes that have ended, and exits as the command did. CUDA IPC refuses memory of a process with the same id
in another PID namespace, and without this each container's command has id 1.
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
"""Ids are chosen from FIRST_ID .. FIRST_ID + IDS - 1. Each id is reached by forking, about 0.3 ms."""


def own_address() -> str:
    """The address of the container's host name; "" if there is none, or only the loopback."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address


def choose_id(address: str, draw: int) -> int:
    """The id for the container with this address: addresses of one network differ in their last bits. Without
    an address the id is random (`draw`)."""
    number = int(ipaddress.ip_address(address)) if address else draw
    return FIRST_ID + number % IDS


def use_up_ids(first_id: int, limit: int = 2 * IDS) -> None:
    """Forks until `first_id` is the next process id; in vain if it has been passed."""
    for _ in range(limit):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        if child >= first_id - 1:
            return


def run(command: list[str]) -> int:
    """Runs the command to its end. Returns its exit code, or 128 + the number of the signal that ended it."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    # Blocked before the fork: signals that arrive from now on stay pending, and none is lost.
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
    """Reaps all processes that have ended; returns `main`'s exit code if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


def main() -> None:
    if len(sys.argv) < 2:
        print("baton: give the command to run, such as: baton serve decode", file=sys.stderr)
        sys.exit(2)
    if os.getpid() == 1:  # otherwise this process shares its PID namespace
        use_up_ids(choose_id(own_address(), random.randrange(IDS)))
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
