"""Compiles grammars in threads of its own and keeps them."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from baton.grammar.base import Backend, CompiledGrammar, GrammarBusy, GrammarError, GrammarSpec

CAPACITY = 128
"""Grammars that are kept, and that may wait to be compiled."""
THREADS = 2
STACK_BYTES = 2**28
"""Stack size of a compiling thread; address space, which takes memory only when it is used. The library
recurses once for each rule of a chain, with about 3 kB: a grammar of MAX_GRAMMAR_BYTES (rpc.validate)
has room in it."""

CompileOutcome = CompiledGrammar | GrammarError


@dataclass(slots=True)
class CompileStats:
    compiled: int = 0
    """Grammars, whether or not it succeeded."""
    seconds: float = 0.0
    """That this took, all together."""


class GrammarCompiler:
    """A grammar is compiled once, however many ask for it; failures are kept as well."""

    def __init__(
        self,
        load: Callable[[], Backend],
        *,
        check: Callable[[GrammarSpec], None] | None = None,
        capacity: int = CAPACITY,
        threads: int = THREADS,
    ) -> None:
        """load: called once, in a compiling thread, when the first grammar is asked for; its GrammarError
        fails every grammar. check: called in a compiling thread, before a grammar is compiled; its
        GrammarError is the outcome."""
        self.stats = CompileStats()
        self.loaded: Future[None] = Future()
        """Done once `load` has returned or failed."""
        self._load = load
        self._check = check
        self._backend: Backend | GrammarError | None = None
        self._capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSpec, Future[CompileOutcome]] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec, Future[CompileOutcome]]] = queue.SimpleQueue()
        self._waiting = 0
        self._unstarted = threads

    def submit(self, spec: GrammarSpec) -> Future[CompileOutcome]:
        """The outcome; `running()` is true from when a thread compiles it, which cannot be interrupted.
        GrammarBusy where too many wait. From any thread."""
        with self._lock:
            future = self._kept.get(spec)
            if future is None:
                if self._waiting >= self._capacity:
                    busy: Future[CompileOutcome] = Future()
                    busy.set_result(
                        GrammarBusy(f"{self._waiting} others wait to be compiled: ask again later")
                    )
                    return busy
                self._waiting += 1
                future = self._kept[spec] = Future()
                self._jobs.put((spec, future))
                self._start_thread()
            self._kept.move_to_end(spec)
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return future

    def _start_thread(self) -> None:
        if not self._unstarted:
            return
        self._unstarted -= 1
        usual = threading.stack_size(STACK_BYTES)
        try:
            # A daemon: the process does not wait for it at its end.
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(usual)

    def _work(self) -> None:
        while True:
            spec, future = self._jobs.get()
            backend = self._ready()
            with self._lock:
                self._waiting -= 1
            future.set_running_or_notify_cancel()
            began = time.perf_counter()
            outcome = backend if isinstance(backend, GrammarError) else self._compiled(backend, spec)
            with self._lock:
                if isinstance(outcome, GrammarBusy):
                    self._kept.pop(spec, None)  # asking again makes sense
                self.stats.compiled += 1
                self.stats.seconds += time.perf_counter() - began
            future.set_result(outcome)

    def _compiled(self, backend: Backend, spec: GrammarSpec) -> CompileOutcome:
        try:
            if self._check is not None:
                self._check(spec)
        except GrammarError as error:
            return error
        return compiled(backend, spec)

    def _ready(self) -> Backend | GrammarError:
        with self._lock:
            first, self._load = self._load, _loaded
        if first is not _loaded:
            try:
                self._backend = first()
            except GrammarError as error:
                self._backend = error
            except (
                BaseException
            ) as error:  # the library's panics are no Exception; requests would wait in vain
                self._backend = GrammarError(f"no grammar library here: {type(error).__name__}: {error}")
            self.loaded.set_result(None)
        self.loaded.result()
        assert self._backend is not None
        return self._backend


def _loaded() -> Backend:
    raise AssertionError("loaded twice")


def compiled(backend: Backend, spec: GrammarSpec) -> CompileOutcome:
    """Blocks."""
    try:
        return backend.compile(spec)
    except GrammarError as error:
        return error
    except BaseException as error:  # the library's panics are no Exception
        return GrammarError(f"the grammar library failed: {type(error).__name__}: {error}"[:400])
