"""A real etcd of one member, on the loopback, for tests."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ports import free_port

if TYPE_CHECKING:
    from certificates import Pem

START_SECONDS = 30.0


class Etcd:
    """`stop` and `start` keep data and port. `pem`: with TLS; clients must show a certificate of the same
    CA."""

    def __init__(self, binary: str, folder: Path, pem: Pem | None = None) -> None:
        self._binary, self._folder, self._pem = binary, folder, pem
        self.port, self._peer_port = free_port(), free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        scheme = "https" if self._pem is not None else "http"
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        command = [self._binary, "--name", "m", "--data-dir", str(self._folder / "data")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"m={peer}", "--unsafe-no-fsync"]
        if self._pem is not None:
            command += ["--cert-file", self._pem.cert, "--key-file", self._pem.key]
            command += ["--client-cert-auth", "--trusted-ca-file", self._pem.ca]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not accepts(self.port):
            assert self._process.poll() is None, (self._folder / "etcd.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "etcd does not listen"
            time.sleep(0.05)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running_etcd(folder: Path, pem: Pem | None = None) -> Iterator[Etcd]:
    """Skips the test where no etcd is installed."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("etcd is not installed; on Debian and Ubuntu: apt-get install etcd-server")
    etcd = Etcd(binary, folder, pem)
    etcd.start()
    try:
        yield etcd
    finally:
        etcd.stop()
