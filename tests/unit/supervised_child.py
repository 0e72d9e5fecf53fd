"""A process for supervisor tests: gRPC health and the ready line, like `baton serve`, and nothing else.

Arguments: ROLE [--behave MODE] and the flags that the supervisor adds. Modes: good; crash (exits with 3
before it is ready); hang (never ready); stubborn (ignores SIGTERM); after:FILE (ready once FILE is there).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

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
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"{arguments.host}:{arguments.port}")
    server.start()
    print("noise on stdout", flush=True)
    address = f"{arguments.host}:{port}"
    print(f"ready role={arguments.role} address={address} http=none pid={os.getpid()}", flush=True)
    while not stopped.wait(0.2):
        pass
    server.stop(grace=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
