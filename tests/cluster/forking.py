"""Starts `baton serve`, and other commands, by forking a process that has imported what it imports.

To import torch, transformers and FastAPI takes most of the time of a start, and tests start some hundred
processes. What is forked runs the same entry point, with a process id, memory, environment and standard
streams of its own; before the fork there is no thread, no event loop and no gRPC yet. It ends when its
threads have, without taking apart what it has imported.

That a start from nothing and an end to it work as well is seen where subprocess.Popen starts processes:
`unit/test_cli_up.py`. What Python reads when it starts (PYTHONPATH) needs that, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import spare_children
import spare_followers

IMPORTED = (
    "baton.cli.serve",
    "baton.cli.up",
    "baton.cli.verify",
    "baton.cli.status",
    "baton.cli.health",
    "baton.cli.generate",
    "baton.cli.bench_serve",
    "baton.cli.bench_offline",
    "baton.cli.bench_step",
    "baton.api.server",
    "baton.tokenizer.server",
    "baton.worker.process",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.tokenization_auto",
    # By the first model that needs it: 1.3 s, as much as all of transformers above.
    "transformers.models.llama.configuration_llama",
    "transformers.modeling_utils",
    "pydantic.v1",  # by FastAPI, when its application is made
)
MOST_BYTES = 1 << 20
"""Of a message: arguments and environment."""
ANSWER_SECONDS = 240.0
"""The first answer waits for all imports, on a machine with much else to do."""


class Forked:
    """What subprocess.Popen would be; the part of it that tests use."""

    def __init__(
        self, parent: Forks, pid: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
    ) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._parent = parent
        self._ended = os.pidfd_open(pid)  # the pid is nobody else's before the parent has waited for it

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None or not self._gone(0.0) else self.wait()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._gone(timeout):
                raise subprocess.TimeoutExpired(["baton"], timeout or 0.0)
            self.returncode = self._parent.wait(self.pid)
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _gone(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))


class Forks:
    """The process that forks. This one and all lanes (tests/lanes.py) have a connection each; it ends after
    the last of them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: for what libraries read once, when they are loaded."""
        self._lock = threading.Lock()
        self._living: set[int] = set()
        """Processes that this one has asked for."""
        self._ended_seconds = 0.0
        self._connections: dict[int, socket.socket] = {}
        """Of this process, and of the one that it was forked from, by their pids."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0baton-tests-{os.getpid()}-{id(self)}")
            listener.listen()
            self._address = listener.getsockname()
            self._connect()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env=environment,
            )

    def _connect(self) -> socket.socket:
        control = self._connections.get(os.getpid())
        if control is None:
            control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            control.settimeout(ANSWER_SECONDS)
            control.connect(self._address)
            self._connections[os.getpid()] = control
        return control

    def start(
        self,
        arguments: Sequence[str],
        *,
        stderr: IO[bytes],
        environment: Mapping[str, str],
        prelude: str = "",
    ) -> Forked:
        """`baton ARGUMENTS` with a pipe at its standard input and output each.

        prelude: Python that the process runs before.
        """
        (stdin, our_stdin), (our_stdout, stdout) = os.pipe(), os.pipe()
        try:
            pid = self._fork(arguments, [stdin, stdout, stderr.fileno()], environment, prelude)
        except BaseException:
            os.close(our_stdin)
            os.close(our_stdout)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        return Forked(self, pid, os.fdopen(our_stdin, "wb"), os.fdopen(our_stdout, "rb"))

    def start_command(
        self,
        arguments: Sequence[str],
        *,
        stdout: IO[bytes],
        stderr: IO[bytes],
        environment: Mapping[str, str],
    ) -> Forked:
        """`baton ARGUMENTS` without a standard input."""
        with Path(os.devnull).open() as stdin:
            descriptors = [each.fileno() for each in (stdin, stdout, stderr)]
            return Forked(self, self._fork(arguments, descriptors, environment, lifeline=False))

    def run(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], timeout: float = 280.0
    ) -> subprocess.CompletedProcess[str]:
        """`baton ARGUMENTS` to its end, and what it has printed."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self.start_command(arguments, stdout=stdout, stderr=stderr, environment=environment)
            try:
                code = process.wait(timeout)
            except BaseException:
                process.kill()
                process.wait()
                raise
            printed = []
            for file in (stdout, stderr):
                file.seek(0)
                printed.append(file.read().decode())
        return subprocess.CompletedProcess(["baton", *arguments], code, *printed)

    def _fork(
        self,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        prelude: str = "",
        lifeline: bool = True,
    ) -> int:
        """`lifeline`: it ends with its standard input; else at the latest with the process that forks."""
        request = {"arguments": list(arguments), "environment": dict(environment), "prelude": prelude}
        pid = int(self._ask({**request, "lifeline": lifeline}, descriptors)[0])
        self._living.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """The exit code of one that has ended; minus the number of the signal that ended it."""
        code, seconds = self._ask({"wait": pid})
        self._living.discard(pid)
        self._ended_seconds += float(seconds)
        return int(code)

    def seconds(self) -> float:
        """Of processors, by what this process has asked for."""
        total = self._ended_seconds
        for pid in self._living:
            with contextlib.suppress(psutil.Error):
                total += sum(psutil.Process(pid).cpu_times()[:4])
        return total

    def _ask(self, request: dict, descriptors: Sequence[int] = ()) -> list[str]:
        with self._lock:
            control = self._connect()
            try:
                socket.send_fds(control, [json.dumps(request).encode()], descriptors)
                answer = control.recv(100)
                assert answer, "the process that forks has ended"
                return answer.decode().split()
            except BaseException:
                control.close()  # an answer that comes later must not be taken for the next one's
                raise


@functools.cache
def forks(**environment: str) -> Forks:
    """One for this process and those that are forked from it later."""
    return Forks({**os.environ, **environment})


def serve(listener: socket.socket) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each process's first collection copies all pages
    controls = [listener.accept()[0]]
    commands = set[int]()
    while controls:
        ready = select.select([listener, *controls], [], [])[0]
        if listener in ready:
            controls.append(listener.accept()[0])
            ready.remove(listener)
        for control in ready:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 3)
            except ConnectionResetError:
                message = b""
            if not message:
                control.close()
                controls.remove(control)
                continue
            request = json.loads(message)
            if "wait" in request:
                _, status, used = os.wait4(request["wait"], 0)
                answer = f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}"
                commands.discard(request["wait"])
            else:
                pid = os.fork()
                if not pid:
                    for each in (listener, *controls):
                        each.close()
                    become(request["arguments"], request["environment"], request["prelude"], descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                if not request["lifeline"]:
                    commands.add(pid)
                answer = str(pid)
            with contextlib.suppress(OSError):  # whoever asked has ended
                control.send(answer.encode())
    for pid in commands:
        os.kill(pid, signal.SIGKILL)


def become(arguments: list[str], environment: dict[str, str], prelude: str, descriptors: list[int]) -> None:
    """Does not return."""
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["baton", *arguments]
    from baton.cli.main import main

    code = 1
    try:
        exec(prelude, {})
        spare_followers.prepare(arguments)
        spare_children.prepare(arguments, become)
        main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # waits for threads, as the interpreter does
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
