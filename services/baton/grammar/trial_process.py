"""The processes in which `trials` has grammars tried. `python -P -m baton.grammar.trial_process FD...`

The first one reads the vocabulary from its standard input, loads the library, and then only forks: a process
for each connection, which answers what is asked there, and another one instead when it has died. A
process that takes too long is ended by the kernel's alarm. All end when the other side has ended: until the
vocabulary has come by the end of standard input, then by that of the connections.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.grammar.base import Backend

MEMORY_BYTES = 2**30
"""That a grammar may take to compile, besides the stack."""
RESTART_SECONDS = 0.1
"""From the death of a process to the start of the next one."""
NUMBER_BYTES = 8


def serve(descriptors: list[int], load: Callable[[dict[str, Any]], Backend]) -> None:
    """load: makes the backend of trials.TrialVocabulary as plain data."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Whoever stops a whole process group has its workers drain first.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather this one than the node
    vocabulary = sys.stdin.buffer.read()
    if not vocabulary:
        return
    backend = load(json.loads(vocabulary))
    connections = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    running = mmap.mmap(-1, NUMBER_BYTES * len(connections))  # shared: the number of what each one tries
    children = {_fork(index, connections, running, backend): index for index in range(len(connections))}
    while children:
        pid, status = os.wait()
        index = children.pop(pid)
        if code := os.waitstatus_to_exitcode(status):
            _report(connections[index], _running(running, index), -code)
            time.sleep(RESTART_SECONDS)
            children[_fork(index, connections, running, backend)] = index


def _fork(index: int, connections: list[socket.socket], running: mmap.mmap, backend: Backend) -> int:
    _mark(running, index, 0)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for other in connections[:index] + connections[index + 1 :]:
                other.close()
            _answer_all(connections[index], lambda number: _mark(running, index, number), backend)
            code = 0
        finally:
            os._exit(code)
    return pid


def _mark(running: mmap.mmap, index: int, number: int) -> None:
    running[index * NUMBER_BYTES : (index + 1) * NUMBER_BYTES] = number.to_bytes(NUMBER_BYTES)


def _running(running: mmap.mmap, index: int) -> int:
    return int.from_bytes(running[index * NUMBER_BYTES : (index + 1) * NUMBER_BYTES])


def _report(connection: socket.socket, number: int, died_by: int) -> None:
    """How the trial with this number ended the process; 0: none was running."""
    if not number:
        return
    answer: dict[str, Any] = {"number": number}
    if died_by == signal.SIGALRM:
        answer["error"] = "it takes too long to compile: make it smaller"
    elif died_by == signal.SIGKILL:  # the library cannot do that
        answer |= {"busy": True, "error": "the process that tried it was killed: ask again later"}
    else:
        name = signal.Signals(died_by).name if died_by > 0 else f"exit code {-died_by}"
        answer["error"] = (
            f"the grammar library crashes on it ({name}), or needs more than {MEMORY_BYTES >> 20} MiB: "
            "make it smaller or write it otherwise"
        )
    _send(connection, answer)


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # the other side has ended, which the next read shows
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _answer_all(connection: socket.socket, mark: Callable[[int], None], backend: Backend) -> None:
    """Until the other side closes the connection."""
    from baton.grammar.compiler import STACK_BYTES

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES + STACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)  # as where the node compiles
    thread = threading.Thread(target=_answer_each, args=(connection, mark, backend))
    thread.start()
    thread.join()


def _answer_each(connection: socket.socket, mark: Callable[[int], None], backend: Backend) -> None:
    from baton.grammar.base import GrammarError, GrammarSpec
    from baton.grammar.compiler import compiled

    with suppress(OSError), connection.makefile("rb") as questions:
        for line in questions:
            asked = json.loads(line)
            spec = asked["spec"]
            mark(asked["number"])
            signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
            outcome = compiled(backend, GrammarSpec(spec["kind"], spec["text"], tuple(spec["choices"])))
            signal.setitimer(signal.ITIMER_REAL, 0)
            mark(0)
            error = str(outcome) if isinstance(outcome, GrammarError) else ""
            _send(connection, {"number": asked["number"], "error": error})


def _load(vocabulary: dict[str, Any]) -> Backend:
    from baton.grammar.llguidance import LlguidanceBackend

    tokens = [token.encode("latin-1") for token in vocabulary["tokens"]]
    special, eos, size = set(vocabulary["special"]), vocabulary["eos"], vocabulary["vocab_size"]
    # The longest tokens stand for what a grammar forces; the node asks its tokenizer.
    return LlguidanceBackend(tokens, special, eos, size, lambda text: ())


if __name__ == "__main__":
    serve([int(descriptor) for descriptor in sys.argv[1:]], _load)
