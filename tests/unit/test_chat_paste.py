"""Text that is pasted into `baton chat`, on a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

SCRIPT = """
import readline
from baton.cli.generate import read_message

while True:
    print("[read]", repr(read_message()), flush=True)
"""


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        (["one line\n", "and another\n"], ["one line", "and another"]),
        (["first\n\n  second\nthird\n"], ["first\n\n  second\nthird"]),
        (["first\nsecond", " and its end\n"], ["first\nsecond and its end"]),
        (["\x1b[200~first\nsecond\x1b[201~", "\n"], ["first\nsecond"]),
    ],
    ids=["lines", "paste", "paste without an end", "bracketed paste"],
)
def test_a_pasted_text_is_one_message(typed, messages):
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=other,
        stdout=other,
        stderr=other,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(other)
    try:
        seen = read_until(terminal, b"> ")
        for number, text in enumerate(typed):
            os.write(terminal, text.encode())
            if len(messages) == len(typed):
                seen = read_until(terminal, f"{messages[number]!r}".encode())
            time.sleep(0.5)
        for message in messages[-1:]:
            if f"[read] {message!r}".encode() not in seen:
                seen += read_until(terminal, f"[read] {message!r}".encode())
        assert seen.count(b"[read]") == 1
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def read_until(terminal: int, end: bytes) -> bytes:
    seen = b""
    while end not in seen:
        seen += os.read(terminal, 4096)
    return seen
