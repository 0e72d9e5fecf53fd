"""A process for supervisor tests: binds its port and prints the ready line, like `baton serve`.

Arguments: ROLE [--behave MODE] and the flags that the supervisor adds. Modes: good; crash (exits with 3
before it is ready); hang (never ready); stubborn (ignores SIGTERM); after:FILE (ready once FILE is there).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from baton.cli.serve import hold_lifeline


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--behave", default="good")
    parser.add_argument("--seen", default="")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--http-port")
    parser.add_argument("--lifeline", action="store_true")
    arguments = parser.parse_args()
    stopped = threading.Event()
    handler = signal.SIG_IGN if arguments.behave == "stubborn" else lambda *_: stopped.set()
    signal.signal(signal.SIGTERM, handler)
    if arguments.lifeline:
        hold_lifeline(grace_seconds=1.0)
    print(f"role {arguments.role} seen {arguments.seen}", file=sys.stderr, flush=True)
    if arguments.behave == "crash":
        print("the model is not there", file=sys.stderr, flush=True)
        return 3
    if arguments.behave == "hang":
        time.sleep(60)
    if arguments.behave.startswith("after:"):
        while not Path(arguments.behave.removeprefix("after:")).exists():
            time.sleep(0.05)
    with socket.create_server((arguments.host, arguments.port)):
        print("noise on stdout", flush=True)
        print(f"ready role={arguments.role} pid={os.getpid()}", flush=True)
        while not stopped.wait(0.2):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
