"""`pytest --lanes N`: test files side by side in N processes, forked from one that has collected all tests.

To import torch, transformers and all test files takes longer than most of them; here that is done once. A
lane runs one file after the other and asks for the next one when it begins the last test of its file, so that
fixtures of the session last as long as the lane. Then one more lane runs the tests marked `alone`. A lane
that dies fails the test that it ran; the rest of its file goes to a new one.

With `--rerun-failed` each test that failed runs once more in the end, in a lane of its own. If it passes
then, it counts as passed, and the summary names it as flaky and shows its first failure.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import math
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
from _pytest._io import TerminalWriter

import last_run
from last_run import Times

END_SECONDS = 30.0
"""For lanes that are told to end."""
MOST_RERUN = 20
"""Failed tests. If more have failed, something is broken, and none runs again."""

File = deque[int]
"""Tests of one file that a lane has to run, by their places in `session.items`."""
number = 0
"""Of this process: 0 is the one that collects; each lane has its own."""
others: list[Callable[[], float]] = []
"""Seconds of processors that a lane's tests have used in processes that are no children of the lane."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lanes", type=int, default=0, metavar="N", help="test files side by side, see tests/lanes.py"
    )
    parser.addoption(
        "--rerun-failed", action="store_true", help="with --lanes: run failed tests once more in the end"
    )
    parser.addoption(
        "--record",
        metavar="COMMIT",
        help="with --lanes: write into tests/last_run.txt what each file took, and if all pass, COMMIT",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("lanes") and not config.option.collectonly:
        config.pluginmanager.register(Lanes(config), "run in lanes")


def now() -> Times:
    """What this lane has used: of processors by itself, by children that have ended, and by `others`."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    others_used = sum(seconds() for seconds in others)
    return Times(time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used) + others_used)


class Lane:
    """The parent's side of one."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.connection, theirs = Pipe()
        self.todo: File = deque()
        self.began = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self.connection.close()
            become(session, theirs, number)
        theirs.close()

    def give(self, file: File) -> None:
        """An empty file: there are no more."""
        self.todo += file
        with contextlib.suppress(BrokenPipeError):  # its end is seen by whoever reads
            self.connection.send(list(file))

    def end(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            deadline = time.monotonic() + END_SECONDS
            while time.monotonic() < deadline:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.05)
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Lanes:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._count: int = config.getoption("lanes")
        self._rerun: bool = config.getoption("rerun_failed")
        self._failed: dict[str, list[pytest.TestReport]] = {}
        """With `--rerun-failed`: what has failed so far, and is not reported yet."""
        self._numbers = itertools.count(1)
        self._seconds: dict[str, list[float]] = {}
        self._files: dict[str, Times] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        # Made here, for all: else each lane makes one, and pytest removes all but the last three.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        # Whoever runs this and gives up sees what has failed so far.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        alone = [bool(item.get_closest_marker("alone")) for item in session.items]
        try:
            self._run(session, "beside others", self._count, files_of(session, [not one for one in alone]))
            self._run(session, "alone", 1, files_of(session, alone))
        finally:
            failed, self._failed, self._rerun = self._failed, {}, False
            again = len(failed) <= MOST_RERUN and sys.exception() is None
            for reports in failed.values() if not again else ():
                for report in reports:
                    self._report(report)
        if again:
            self._run_again(session, failed)
        return True

    def _run_again(self, session: pytest.Session, failed: dict[str, list[pytest.TestReport]]) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        for place, item in enumerate(session.items):
            if item.nodeid in failed:
                before = session.testsfailed
                self._run(session, "again", 1, deque([deque([place])]))
                if session.testsfailed == before:
                    terminal.stats.setdefault("flaky", []).extend(failed[item.nodeid])

    def _report(self, report: pytest.TestReport) -> None:
        if report.failed and self._rerun:
            self._failed.setdefault(report.nodeid, []).append(report)
        else:
            self._config.hook.pytest_runtest_logreport(report=report)

    def _run(self, session: pytest.Session, name: str, count: int, files: deque[File]) -> None:
        began = time.monotonic()
        lanes: dict[Connection, Lane] = {}
        seconds = self._seconds.setdefault(name, [])
        try:
            while files or lanes:
                while len(lanes) < min(count, len(lanes) + len(files)):
                    lane = Lane(session, next(self._numbers))
                    lanes[lane.connection] = lane
                    lane.give(files.popleft())
                for connection in wait(list(lanes)):
                    assert isinstance(connection, Connection)
                    lane = lanes[connection]
                    try:
                        what, *of = connection.recv()
                    except (EOFError, ConnectionResetError):
                        del lanes[connection]
                        code = lane.end()
                        if lane.todo:
                            self._died(session, lane, code)
                            if lane.todo:
                                files.appendleft(lane.todo)
                        seconds.append(time.monotonic() - began)
                        continue
                    if what == "next":
                        if session.shouldfail or session.shouldstop:
                            files.clear()
                        lane.give(files.popleft() if files else deque())
                    elif what == "done":  # with all its repeats
                        item = session.items[lane.todo.popleft()]
                        assert item.nodeid == of[0]
                        name = last_run.file_of(item.nodeid)
                        self._files[name] = self._files.get(name, Times(0.0, 0.0)).plus(of[1])
                    else:
                        self._tell(what, of)
        finally:
            for lane in lanes.values():
                os.kill(lane.pid, signal.SIGTERM)
            for lane in lanes.values():
                lane.end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _tell(self, what: str, of: list[Any]) -> None:
        hook = self._config.hook
        if what == "report":
            self._report(hook.pytest_report_from_serializable(config=self._config, data=of[0]))
        elif what == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=of[0])
        elif what == "start":
            hook.pytest_runtest_logstart(nodeid=of[0], location=of[1])
        else:
            hook.pytest_runtest_logfinish(nodeid=of[0], location=of[1])

    def _died(self, session: pytest.Session, lane: Lane, code: int) -> None:
        item = session.items[lane.todo.popleft()]
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._report(
            pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"the process that ran this test ended with {why}",
                when="call",
            )
        )

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        commit = self._config.getoption("record")
        if commit is not None:
            before = last_run.read(self._config.rootpath)
            passed = commit if exitstatus == pytest.ExitCode.OK else ""
            found = last_run.LastRun(passed or before.commit, {**before.files, **self._files})
            last_run.write(self._config.rootpath, found)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, seconds in self._seconds.items():
            if seconds:
                ends = ", ".join(f"{second:.0f}" for second in sorted(seconds))
                terminalreporter.write_line(f"lanes, {name}: ended after {ends} s")
        used = sum(times.processors for times in self._files.values())
        terminalreporter.write_line(f"seconds of processors, by all tests together: {used:.0f}")
        flaky = terminalreporter.stats.get("flaky", [])
        for report in flaky:
            terminalreporter.write_sep("_", f"flaky, its first failure: {report.nodeid} ({report.when})")
            terminalreporter._outrep_summary(report)
        for report in flaky:
            terminalreporter.write_line(
                f"FLAKY {report.nodeid}: failed, and passed when it ran again by itself"
            )


def files_of(session: pytest.Session, wanted: list[bool]) -> deque[File]:
    """The wanted tests by file. Those files first that took longest in the last run, so that no lane is left
    alone with one in the end; new ones before them."""
    files: dict[str, File] = {}
    for place, (item, want) in enumerate(zip(session.items, wanted, strict=True)):
        if want:
            files.setdefault(last_run.file_of(item.nodeid), deque()).append(place)
    took, new = last_run.read(session.config.rootpath).files, Times(math.inf, 0.0)
    return deque(files[name] for name in sorted(files, key=lambda name: -took.get(name, new).wall))


class Terminal:
    """What plugins of a lane ask of the terminal's (pytest-timeout writes into the report of the test)."""

    def __init__(self) -> None:
        self.stats: dict[str, list[Any]] = {}

    @property
    def _tw(self) -> TerminalWriter:
        return TerminalWriter(sys.stderr)


class Telling:
    """What a lane does instead of printing."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send(("start", nodeid, location))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send(("finish", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        given, name, text = warning_message, warning_message.category.__name__, str(warning_message.message)
        # The message may hold anything, and its class may be local: neither can be sent then.
        category = getattr(builtins, name, UserWarning)
        text = text if category is given.category else f"{name}: {text}"
        sent = warnings.WarningMessage(text, category, given.filename, given.lineno)
        of = {"warning_message": sent, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", of))


def become(session: pytest.Session, connection: Connection, own: int) -> None:
    """A lane; does not return."""
    global number
    number = own
    code = 1
    try:
        random.seed()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # fixtures end what they have started
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(Terminal(), "terminalreporter")
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # into files that all lanes would share
        capture.start_global_capturing()
        plugins.register(Telling(session.config, connection))
        for item, following in pairs(session, connection):
            before = now()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            after = now()
            took = Times(after.wall - before.wall, after.processors - before.processors)
            connection.send(("done", item.nodeid, took))
        code = 0
    except (KeyboardInterrupt, BrokenPipeError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the parent's both come
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)
    except BaseException:
        with open(
            os.devnull if sys.__stderr__ is None else sys.__stderr__.fileno(), "w", closefd=False
        ) as stderr:
            traceback.print_exc(file=stderr)
    finally:
        os._exit(code)


def pairs(
    session: pytest.Session, connection: Connection
) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test, and the one after it."""

    def ask() -> list[pytest.Item]:
        connection.send(("next",))
        return [session.items[place] for place in connection.recv()]

    todo = deque(session.items[place] for place in connection.recv())
    while todo:
        item = todo.popleft()
        if not todo:
            todo.extend(ask())
        yield item, todo[0] if todo else None
