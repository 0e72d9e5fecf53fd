"""The log: lines of a process and of libraries look alike, and nothing fails for want of a reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import logging, sys
from baton.rpc.logs import configure, get_logger
log = get_logger()
configure("decode", {level!r}, form={form!r}, name="d0")
log.debug("not shown", n=1)
log.info("a line", request="r 1", n=2)
try:
    secret = "zyzzyva"
    raise KeyError("gone")
except KeyError:
    log.exception("failed", n=3)
log.log(30, "link down", n=4)
logging.getLogger("grpc").info("of a library")
logging.getLogger("grpc").warning("of a library, %s", "too")
print("done")
"""


def run(**options):
    code = CODE.format(**{"level": "info", "form": "text", **options})
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "done\n"
    return done.stderr


def test_lines_of_this_process_and_of_libraries():
    shown = run()
    lines = [line for line in shown.splitlines() if line.startswith("timestamp=")]
    assert all("role=decode event=" in line and "name=d0" in line for line in lines)
    said = [line.split("event=")[1].replace(" name=d0", "") for line in lines]
    assert said[0] == '"a line" request="r 1" n=2'
    assert said[1].startswith("failed n=3") and "KeyError: 'gone'" in shown
    assert said[2:] == ['"link down" n=4', '"of a library, too"']
    assert [line.split("level=")[1].split()[0] for line in lines] == ["info", "error", "warning", "warning"]


def test_json_shows_no_variables():
    lines = [json.loads(line) for line in run(form="json").splitlines()]
    assert [line["event"] for line in lines] == ["a line", "failed", "link down", "of a library, too"]
    assert lines[1]["exception"][0]["exc_type"] == "KeyError" and "zyzzyva" not in json.dumps(lines)


def test_levels():
    assert "not shown" in run(level="debug")
    assert "a line" not in run(level="warning") and "link down" in run(level="warning")


def test_a_reader_that_is_gone_fails_nothing():
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE.format(level="info", form="text")], stdout=subprocess.PIPE, stderr=write
    )
    os.close(write)
    os.close(read)
    assert process.communicate(timeout=240)[0] == b"done\n"
