"""A port of the loopback that leads to a port of a host, whatever has become of the host's cables."""

from __future__ import annotations

import contextlib
import socket
import threading

from hosts.host import Host

PIECE = 65536


class Door:
    """`address`: where to connect to. Connections go on from the host itself to its port at `target`."""

    def __init__(self, host: Host, target: str) -> None:
        self._host, self._target = host, target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name=f"door {target}", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                outer, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                inner = self._host.connect(self._target)
            except OSError:
                outer.close()
                continue
            self._open |= {outer, inner}
            for source, sink in ((outer, inner), (inner, outer)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                sink.sendall(data)
        for each in (source, sink):
            # Wakes the other direction's thread too.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()
        self._open.discard(source)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
