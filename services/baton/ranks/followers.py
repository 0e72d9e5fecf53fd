"""The processes of a worker's further ranks, as rank 0 starts and watches them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.layers.shard import Shard
from baton.ranks.channel import Channel, ChannelError

IMPORT_SECONDS = 120.0
"""For a follower to start and load its libraries."""
LOAD_SECONDS = 1800.0
"""For a follower to load its shard."""
ANSWER_SECONDS = 120.0
"""For other work of a follower."""
SEND_SECONDS = 20.0
"""For a follower to take a message."""
FAILED_SECONDS = 0.5
"""For a follower that has failed to end."""
EXIT_FAILED = 1
"""A follower's exit code if the start or a step failed there."""
END_SECONDS = 2.0
"""For followers to end by themselves."""


class FollowerError(Exception):
    """A follower could not start. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a follower."""

    shard: Shard
    rendezvous: Path
    parent: int
    """Rank 0's process id."""
    config: Any
    """Its WorkerConfig."""


@dataclass(frozen=True, slots=True)
class MakePool:
    """Rank 0 asks for a pool and a runner over it."""

    pages: int
    page_size: int
    context: int
    segment: Path
    """That holds the pool, which all ranks share."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A follower's last answer: why it could not do what it was asked."""

    message: str


class Followers:
    """All further ranks. `close` ends them."""

    def __init__(self, size: int, config: Any) -> None:
        """Starts them; they load their libraries meanwhile. `config`: for `Setup`."""
        self._directory = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        self.rendezvous = self._directory / "rendezvous"
        self.channels: list[Channel] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._lock = threading.Lock()
        try:
            for rank in range(1, size):
                self._start(Setup(Shard(rank, size), self.rendezvous, os.getpid(), config))
        except BaseException:
            self.close()
            raise

    def _start(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "baton.ranks.follower", str(theirs.fileno())]
            # Not a console's process group: rank 0 decides when followers end.
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.processes.append(process)
        self.channels.append(Channel(ours, SEND_SECONDS))
        try:
            self.channels[-1].send(setup)
        except ChannelError as error:
            raise FollowerError(f"rank {setup.shard.rank} could not be started: {error}") from error

    def await_all(self, seconds: float) -> list[Any]:
        """The next answer of each. Raises FollowerError."""
        deadline, answers = time.monotonic() + seconds, []
        for rank, channel in enumerate(self.channels, 1):
            try:
                answer = channel.receive(max(0.0, deadline - time.monotonic()))
            except ChannelError as error:
                raise FollowerError(f"rank {rank} could not be started: {error}") from error
            if isinstance(answer, Failed):
                raise FollowerError(f"rank {rank}: {answer.message}")
            answers.append(answer)
        return answers

    def ask(self, what: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Sends the same to all; their answers. Raises FollowerError."""
        try:
            for channel in self.channels:
                channel.send(what)
        except ChannelError as error:
            raise FollowerError(f"a rank is lost: {error}") from error
        return self.await_all(seconds)

    def met(self) -> None:
        """The ranks have formed their group: its file is needed no more."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def watch(self, lost: Callable[[int, int], None]) -> None:
        """Calls `lost` with rank and exit code, in a thread, when a follower ends by itself."""
        for rank, process in enumerate(self.processes, 1):
            name = f"watch of rank {rank}"
            threading.Thread(target=self._watch, args=(rank, process, lost), name=name, daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], lost: Callable[[int, int], None]) -> None:
        code = process.wait()
        with self._lock:
            if self._closing:
                return
        lost(rank, code)

    def failed(self) -> bool:
        """Whether one has ended with an error of its own, not by a signal; waits a moment for it."""
        deadline = time.monotonic() + FAILED_SECONDS
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self.processes]
            # Others, which have lost it, may end before the one that has failed.
            if EXIT_FAILED in codes or None not in codes:
                return EXIT_FAILED in codes
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        """Ends them at once."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Ends them; those that do not end by themselves are killed."""
        with self._lock:
            self._closing = True
        for channel in self.channels:
            channel.close()  # which followers notice, unless they hang
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.met()
