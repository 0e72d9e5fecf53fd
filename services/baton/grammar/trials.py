"""Tries each grammar in a process that may die before the node itself compiles it.

The library is native code: a grammar that makes it crash, or take all memory, would end the node with all
requests there. `trial_process` is the other side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import IO, Any

from baton.grammar.base import GrammarBusy, GrammarError, GrammarSpec

COMMAND = (sys.executable, "-P", "-m", "baton.grammar.trial_process")
TRIAL_SECONDS = 8.0
"""The longest that a grammar may take to compile."""
LOAD_SECONDS = 60.0
"""The longest that the processes may take to load the library and the vocabulary."""
ANSWER_SECONDS = TRIAL_SECONDS + 5.0
"""The longest that an answer may take: a trial, after the start of a process instead of a dead one."""
RESTART_SECONDS = 10.0
"""Between two starts of all processes, at least."""
CAPACITY = 4096
"""Verdicts that are kept, by the grammars' digests."""
MAX_ANSWER_BYTES = 1 << 14
_BUSY = "the process that tries grammars is being started: ask again later"


@dataclass(frozen=True, slots=True)
class TrialVocabulary:
    """What LlguidanceBackend gets of the model."""

    tokens: Sequence[bytes | None]
    special: Sequence[int]
    eos: Sequence[int]
    vocab_size: int


class Trials:
    """Thread-safe. The first process is started at once, before weights are loaded, and executed anew: it
    shares nothing with this process. It is small until `load`."""

    def __init__(self, *, width: int, command: Sequence[str] = COMMAND) -> None:
        """width: grammars that are tried at a time."""
        self._width = width
        self._command = command
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # why it cannot be compiled; empty: it can
        self._vocabulary = b""
        self._started = time.monotonic()
        self._processes: _Processes | None = _Processes(command, width)

    def load(self, vocabulary: TrialVocabulary) -> None:
        """Has the library and the vocabulary loaded, and returns before they are."""
        plain = {
            "tokens": [(token or b"").decode("latin-1") for token in vocabulary.tokens],
            "special": list(vocabulary.special),
            "eos": list(vocabulary.eos),
            "vocab_size": vocabulary.vocab_size,
        }
        self._vocabulary = json.dumps(plain).encode()
        if (processes := self._processes) is not None:
            processes.load(self._vocabulary)

    def check(self, spec: GrammarSpec) -> None:
        """Blocks, unless the grammar is known. Raises GrammarError if it cannot be compiled; GrammarBusy if
        that is not known."""
        text = json.dumps(asdict(spec))
        digest = hashlib.sha256(text.encode()).digest()
        with self._lock:
            verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = self._try(text)
        with self._lock:
            self._verdicts[digest] = verdict
            self._verdicts.move_to_end(digest)
            if len(self._verdicts) > CAPACITY:
                self._verdicts.popitem(last=False)
        if verdict:
            raise GrammarError(verdict)

    def close(self) -> None:
        with self._lock:
            processes, self._processes = self._processes, None
            self._started = float("inf")
        if processes is not None:
            processes.close()

    def _try(self, text: str) -> str:
        processes = self._usable()
        try:
            answer = processes.ask(text)
        except (OSError, ValueError, queue.Empty) as error:
            with self._lock:
                if self._processes is processes:
                    self._processes = None
            processes.close()
            raise GrammarBusy(_BUSY) from error
        if answer.get("busy"):
            raise GrammarBusy(answer["error"])
        return str(answer["error"])

    def _usable(self) -> _Processes:
        with self._lock:
            if self._processes is None:
                if time.monotonic() - self._started < RESTART_SECONDS:
                    raise GrammarBusy(_BUSY)
                self._started = time.monotonic()
                self._processes = _Processes(self._command, self._width)
                self._processes.load(self._vocabulary)
            return self._processes


class _Processes:
    """One process that loads, and as many as grammars are tried at a time, which it forks. They end when this
    side of their connections is closed, with this process at the latest."""

    def __init__(self, command: Sequence[str], width: int) -> None:
        pairs = [socket.socketpair() for _ in range(width)]
        theirs = [their.fileno() for _, their in pairs]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=theirs,
                # More threads than one could not be forked.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            )
        finally:
            for _, their in pairs:
                their.close()
        self._loaded = threading.Event()
        self._free: queue.SimpleQueue[_Connection] = queue.SimpleQueue()
        self._connections = [_Connection(our) for our, _ in pairs]
        for connection in self._connections:
            self._free.put(connection)

    def load(self, vocabulary: bytes) -> None:
        threading.Thread(
            target=self._load, args=(vocabulary,), name="grammar vocabulary", daemon=True
        ).start()

    def _load(self, vocabulary: bytes) -> None:
        """The other side reads when it has started."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(vocabulary)
        except OSError:
            pass  # it has ended: the first question fails, and says so
        finally:
            self._loaded.set()

    def ask(self, text: str) -> dict[str, Any]:
        """Raises OSError, ValueError or queue.Empty if the other side has ended or does not answer."""
        if not self._loaded.wait(LOAD_SECONDS):
            raise TimeoutError("the vocabulary was not read")
        connection = self._free.get(timeout=LOAD_SECONDS + ANSWER_SECONDS)
        answer = connection.ask(text)
        self._free.put(connection)  # not after an error: its answer may come later
        return answer

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


class _Connection:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._answers: IO[bytes] = connection.makefile("rb")
        self._numbers = count(1)
        self._loaded = False

    def ask(self, text: str) -> dict[str, Any]:
        self._socket.settimeout(ANSWER_SECONDS if self._loaded else LOAD_SECONDS + ANSWER_SECONDS)
        number = next(self._numbers)
        self._socket.sendall(
            b'{"number": %d, "seconds": %f, "spec": %b}\n' % (number, TRIAL_SECONDS, text.encode())
        )
        while True:
            line = self._answers.readline(MAX_ANSWER_BYTES)
            if not line.endswith(b"\n"):
                raise ConnectionError("the process that tries grammars has ended")
            answer: dict[str, Any] = json.loads(line)
            if answer["number"] == number:
                self._loaded = True
                return answer

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
