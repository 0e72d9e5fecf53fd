"""The processes of a worker's further ranks, as rank 0 starts and watches them. Those of another host are
started there, and come to rank 0 over TCP."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
FAILED_SECONDS = 2.0
"""For a follower that has failed to end."""
EXIT_FAILED = 1
"""A follower's exit code if the start or a step failed there."""
EXIT_LOST = 3
"""A follower's exit code if it has lost another rank."""
END_SECONDS = 2.0
"""For followers to end by themselves."""


class FollowerError(Exception):
    """A follower could not start. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a follower."""

    shard: Shard
    rendezvous: Path | tuple[str, int] | None
    """The communicators' store; a file is one whose descriptor all inherit. None: rank 0 is on another host;
    it joins it there."""
    parent: int
    """The process that starts it."""
    config: Any
    """Its WorkerConfig."""
    address: str = "127.0.0.1"
    """Of this host, for other ranks' connections."""
    secret: str = field(default="", repr=False)
    """To join rank 0 with."""


@dataclass(frozen=True, slots=True)
class Meet:
    """All ranks of all hosts are there and have loaded their libraries: now they meet, which has a time
    limit."""


@dataclass(frozen=True, slots=True)
class MakePool:
    """Rank 0 asks for a pool and a runner over it."""

    pages: int
    page_size: int
    context: int
    segment: Path | None
    """That holds the pool, which all ranks of a host share. None: make it. On a GPU each rank has its own."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shard is there."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The pool is there."""

    pid: int
    host: str
    device: str
    resident_bytes: int
    segment: Path | None
    """That it has made."""
    part: bytes = b""
    """On a GPU: its part of the pages, a CudaIpcPart."""


@dataclass(frozen=True, slots=True)
class End:
    """Rank 0 ends as it was asked. Without it, it has been killed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A follower's last answer: why it could not do what it was asked."""

    message: str


class Followers:
    """The further ranks that this process started, and those of other hosts that came. `close` ends them."""

    def __init__(
        self,
        shards: Sequence[Shard],
        config: Any,
        store: tuple[str, int] | None = None,
        *,
        address: str = "127.0.0.1",
        secret: str | None = None,
    ) -> None:
        """Starts one for each shard; they load their libraries meanwhile. `config`: for `Setup`; `store`: of
        several hosts; `secret`: rank 0 is on another host, and they join it."""
        # In memory alone: whenever rank 0 ends, no file is left. It is never closed, because torch's store
        # opens it again when it is destroyed, and aborts the process if it cannot.
        self._descriptor = os.memfd_create("baton-ranks")
        self.rendezvous = store or Path(f"/proc/self/fd/{self._descriptor}")
        self.channels: dict[int, Channel] = {}
        """By rank."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """By rank; of this host."""
        self._others: dict[int, int | None] = {}
        """Exit codes of ranks of other hosts, as far as they are known."""
        self._watches: list[threading.Thread] = []
        self._lost: Callable[[int, int], None] = lambda rank, code: None
        self._closing = False
        self._lock = threading.Lock()
        where = None if secret is not None else self.rendezvous
        try:
            for shard in shards:
                self._start(Setup(shard, where, os.getpid(), config, address, secret or ""))
        except BaseException:
            self.close()
            raise

    def _start(self, setup: Setup) -> None:
        rank = setup.shard.rank
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "baton.ranks.follower", str(theirs.fileno())]
            # Not a console's process group: rank 0 decides when followers end. But the same session: then the
            # kernel ends (SIGHUP) a follower that is stopped when rank 0 ends.
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), self._descriptor],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self.processes[rank] = process
        self.channels[rank] = Channel(ours, SEND_SECONDS)
        try:
            self.channels[rank].send(setup)
        except ChannelError as error:
            raise FollowerError(f"rank {rank} could not be started: {error}") from error

    def add(self, rank: int, channel: Channel) -> None:
        """One of another host."""
        self.channels[rank] = channel
        self._others[rank] = None

    def await_all(self, seconds: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The next answer of each of these ranks, or of all. Raises FollowerError."""
        deadline, answers = time.monotonic() + seconds, {}
        for rank in self.channels if ranks is None else ranks:
            try:
                answer = self.channels[rank].receive(max(0.0, deadline - time.monotonic()))
            except ChannelError as error:
                raise FollowerError(f"rank {rank} could not be started: {error}") from error
            if isinstance(answer, Failed):
                raise FollowerError(f"rank {rank}: {answer.message}")
            answers[rank] = answer
        return answers

    def ask(self, what: Any, ranks: Sequence[int], seconds: float = ANSWER_SECONDS) -> dict[int, Any]:
        """Sends these ranks the same; their answers. Raises FollowerError."""
        self.tell(what, ranks)
        return self.await_all(seconds, ranks)

    def tell(self, what: Any, ranks: Sequence[int] | None = None) -> None:
        """Sends these ranks, or all, the same. Raises FollowerError."""
        try:
            for rank in self.channels if ranks is None else ranks:
                self.channels[rank].send(what)
        except ChannelError as error:
            raise FollowerError(f"a rank is lost: {error}") from error

    def watch(self, lost: Callable[[int, int], None]) -> None:
        """Calls `lost` with rank and exit code, in a thread, when a follower ends by itself. They must not be
        asked any more."""
        self._lost = lost
        for rank in self.channels:
            wait = self._wait_here if rank in self.processes else self._wait_there
            name = f"watch of rank {rank}"
            thread = threading.Thread(target=self._watch, args=(rank, wait), name=name, daemon=True)
            if rank in self._others:
                self._watches.append(thread)
            thread.start()

    def _watch(self, rank: int, wait: Callable[[int], int]) -> None:
        self.lose(rank, wait(rank))

    def lose(self, rank: int, code: int = EXIT_LOST) -> None:
        """This rank has ended, or is reached no more."""
        with self._lock:
            if self._closing:
                return
        self._lost(rank, code)

    def _wait_here(self, rank: int) -> int:
        return self.processes[rank].wait()

    def _wait_there(self, rank: int) -> int:
        """A follower says nothing more but why it fails; then its connection ends."""
        code = EXIT_LOST
        try:
            if isinstance(self.channels[rank].receive(None), Failed):
                code = EXIT_FAILED
        except ChannelError:
            pass
        self._others[rank] = code
        return code

    def failed(self) -> bool:
        """Whether one has ended with an error of its own, not by a signal; waits a moment for it."""
        deadline = time.monotonic() + FAILED_SECONDS
        while time.monotonic() < deadline:
            codes = [*(process.poll() for process in self.processes.values()), *self._others.values()]
            # Others, which have lost it, may end before the one that has failed.
            if EXIT_FAILED in codes or None not in codes:
                return EXIT_FAILED in codes
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        """Ends those of this host at once; the others notice that their connections have ended."""
        for process in self.processes.values():
            process.kill()

    def close(self) -> None:
        """Ends them; those that do not end by themselves are killed."""
        with self._lock:
            self._closing = True
        for channel in self.channels.values():
            with contextlib.suppress(ChannelError):
                channel.send(End())
        for rank in self._others:
            self.channels[rank].end()
        for thread in self._watches:
            if thread is not threading.current_thread():
                thread.join(END_SECONDS)  # it waits for the connection, which has ended
        for channel in self.channels.values():
            channel.close()  # which followers notice, unless they hang
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
