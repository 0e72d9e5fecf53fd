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
from typing import TypeVar

from baton.authentication.cluster import ClusterCredentials
from baton.config import WorkerConfig
from baton.layers.tensor_parallel import Shard
from baton.worker.ranks.channel import Channel, ChannelError
from baton.worker.ranks.messages import End, Failed, Message, Setup

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


M = TypeVar("M", bound=Message)


class FollowerError(Exception):
    """A follower could not start. One line that says what to do."""


class Followers:
    """The further ranks that this process started, and those of other hosts that came. `close` ends them."""

    def __init__(
        self,
        shards: Sequence[Shard],
        config: WorkerConfig,
        store: tuple[str, int] | None = None,
        *,
        address: str = "127.0.0.1",
        cluster: ClusterCredentials | None = None,
    ) -> None:
        """Starts one for each shard; they load their libraries meanwhile. `store`: of several
        hosts; `cluster`: rank 0 is on another host, and they join it."""
        # In memory alone: whenever rank 0 ends, no file is left. It is never closed, because torch's store
        # opens it again when it is destroyed, and aborts the process if it cannot.
        self._descriptor = os.memfd_create("baton-ranks")
        self.rendezvous: str | tuple[str, int] = store or f"/proc/self/fd/{self._descriptor}"
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
        where = None if cluster is not None else self.rendezvous
        try:
            for shard in shards:
                self._start(Setup(shard, where, os.getpid(), config, address, cluster))
        except BaseException:
            self.close()
            raise

    def _start(self, setup: Setup) -> None:
        rank = setup.shard.rank
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "baton.worker.ranks.follower_main", str(theirs.fileno())]
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

    def await_all(self, kind: type[M], seconds: float, ranks: Sequence[int] | None = None) -> dict[int, M]:
        """The next answer of each of these ranks, or of all. Raises FollowerError."""
        deadline = time.monotonic() + seconds
        answers: dict[int, M] = {}
        for rank in self.channels if ranks is None else ranks:
            try:
                answer = self.channels[rank].receive(max(0.0, deadline - time.monotonic()))
            except ChannelError as error:
                raise FollowerError(f"rank {rank} could not be started: {error}") from error
            if isinstance(answer, Failed):
                raise FollowerError(f"rank {rank}: {answer.message}")
            if not isinstance(answer, kind):
                raise FollowerError(f"rank {rank} said {type(answer).__name__}, not {kind.__name__}")
            answers[rank] = answer
        return answers

    def ask(self, what: Message, kind: type[M], ranks: Sequence[int]) -> dict[int, M]:
        """Sends these ranks the same; their answers. Raises FollowerError."""
        self.tell(what, ranks)
        return self.await_all(kind, ANSWER_SECONDS, ranks)

    def tell(self, what: Message, ranks: Sequence[int] | None = None) -> None:
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
