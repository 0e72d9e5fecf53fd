"""A network namespace that stands for a machine. Files, shared memory and process ids are the test's own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
COMMAND_SECONDS = 60.0
CONNECT_SECONDS = 15.0
NAMES = "batontest"
"""Namespaces of tests are called this, the test process's id and a name of their own."""


class CannotMakeHosts(Exception):
    """This machine allows no network namespaces."""


class Host:
    """`address`: its own, on no cable in particular; routes to others come with the cables."""

    def __init__(self, name: str, address: str) -> None:
        """Raises CannotMakeHosts."""
        self.name, self.address = name, address
        self.namespace = f"{NAMES}-{os.getpid()}-{name}"
        if shutil.which("ip") is None:
            raise CannotMakeHosts("no `ip` command: apt-get install iproute2")
        try:
            run("ip", "netns", "add", self.namespace)
        except subprocess.CalledProcessError as error:
            raise CannotMakeHosts(f"ip netns add: {error.stderr.strip()}") from None
        # Sockets belong to the namespace of the thread that makes them.
        self._inside = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=enter, initargs=(self.namespace,)
        )
        self.ip("link", "set", "lo", "up")
        self.ip("address", "add", f"{address}/32", "dev", "lo")

    def inside(self, function: Callable[[], T]) -> T:
        """Calls it in a thread of this host: for what belongs to a namespace from its making on."""
        return self._inside.submit(function).result(COMMAND_SECONDS)

    def connect(self, address: str) -> socket.socket:
        """A TCP connection from this host. Raises OSError."""
        made = self.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            made.settimeout(CONNECT_SECONDS)
            host, _, port = address.rpartition(":")
            made.connect((host, int(port)))
            made.settimeout(None)
        except BaseException:
            made.close()
            raise
        return made

    def ip(self, *arguments: str) -> str:
        return run("ip", "-n", self.namespace, *arguments)

    def tc(self, *arguments: str) -> str:
        return run("tc", "-n", self.namespace, *arguments)

    def received(self, device: str) -> int:
        """Bytes that have come in by a device."""
        (about,) = json.loads(self.ip("-json", "-statistics", "link", "show", "dev", device))
        return int(about["stats64"]["rx"]["bytes"])

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs these on this host, with the process id that it is started with."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def remove(self) -> None:
        """With all its devices. Processes on it must have ended."""
        self._inside.shutdown()
        run("ip", "netns", "delete", self.namespace)


def enter(name: str) -> None:
    """The calling thread, and threads that it starts, are in this network namespace."""
    with Path("/run/netns", name).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def run(*command: str) -> str:
    """Its output. Raises CalledProcessError, with what it said as `stderr`."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_SECONDS)
    return done.stdout


def reap() -> None:
    """Removes the namespaces of test processes that are gone."""
    if shutil.which("ip") is None:
        return
    found: list[dict[str, Any]] = json.loads(run("ip", "-json", "netns", "list") or "[]")
    for name in [str(each["name"]) for each in found]:
        words = name.split("-")
        if words[0] == NAMES and len(words) == 3 and not Path("/proc", words[1]).exists():
            run("ip", "netns", "delete", name)
