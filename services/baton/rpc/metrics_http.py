"""GET /metrics and GET /health of a process that serves no other HTTP."""

from __future__ import annotations

import json
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.rpc.cluster import ClusterTls, same
from baton.rpc.door import bearer

Health = Callable[[], tuple[bool, list[str]]]
"""Whether the process serves, and what is wrong with it. Called on the HTTP server's threads."""
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

READ_SECONDS = 10.0
"""A reader that says nothing for so long, or does not read, is left."""


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    health: Health,
    secret: str = "",
    tls: ClusterTls | None = None,
) -> tuple[int, Callable[[], None]]:
    """Serves GET /metrics and GET /health (503 while the process does not serve) from threads.

    Returns the port bound (0 asks for a free one) and what closes it. secret: readers of metrics must send
    it, as `Authorization: Bearer SECRET`, and health tells strangers no more than its status; empty: none.
    tls: readers must show a certificate of its CA. Raises OSError when the port cannot be bound, SSLError for
    bad certificates.
    """
    server = _Server(host, port, _context(tls) if tls is not None else None)
    metrics = make_wsgi_app(registry)
    server.set_app(_app(_guarded(metrics, secret) if secret else metrics, health, tell=not secret))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)

    return server.server_port, close


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """No line for each scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        self._context = context
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, where = found[0]
        super().__init__((str(where[0]), port), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, the handshake too: a reader that stalls holds up nobody."""
        request.settimeout(READ_SECONDS)
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away or showed no certificate is no error of this process."""


def _app(metrics: Wsgi, health: Health, tell: bool) -> Wsgi:
    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(environ, start)
        if path != "/health":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"see /metrics and /health\n"]
        serving, problems = health()
        body: dict[str, Any] = {"status": "serving" if serving else "not serving"}
        if tell:
            body["problems"] = problems
        start("200 OK" if serving else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return app


def _guarded(app: Wsgi, secret: str) -> Wsgi:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if same(bearer(environ.get("HTTP_AUTHORIZATION", "")), secret):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"send the cluster secret: Authorization: Bearer SECRET\n"]

    return guarded


def _context(tls: ClusterTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=tls.ca.decode("latin-1"))
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:  # readable by its user only
        cert, key = Path(folder, "cert"), Path(folder, "key")
        cert.write_bytes(tls.cert)
        key.write_bytes(tls.key)
        context.load_cert_chain(cert, key)
    return context
