"""How the ranks of a worker on several hosts find rank 0, and prove to each other that they belong together.

Rank 0's host listens at the address that all name, until every other rank has come. All connections are
mutual TLS (Python's), by the deployment's certificates, or by one that both sides derive from the cluster
secret. What a rank says when it comes, and the answer, are JSON.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import ssl
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

import baton
from baton.authentication.cluster import ClusterCredentials, ClusterTls, same
from baton.rpc.address import family_of, join_address
from baton.rpc.errors import BatonError
from baton.rpc.logs import get_logger
from baton.worker.ranks.channel import Channel, ChannelError

JOIN_SECONDS = 600.0
"""How long the hosts wait for each other."""
HANDSHAKE_SECONDS = 10.0
"""For all of it."""
TURN_SECONDS = 60.0
"""For the master to begin it: others may come first."""
RETRY_SECONDS = 0.25
SEND_SECONDS = 20.0
"""For the other side to take a message."""
MAX_HANDSHAKES = 64
"""At a time."""
KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 5),
    (socket.TCP_USER_TIMEOUT, 15_000),
)
"""A host that has vanished is noticed within 15 seconds."""
PLANS, PAGES = "plans", "pages"
"""What a connection is for."""
OTHER_SECRET = "the other side has another cluster secret: give both the same --cluster-secret-file"

_log = get_logger()


class JoinError(Exception):
    """The hosts of a worker do not come together. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class Join:
    """What a rank says when it comes."""

    rank: int
    purpose: str
    settings: dict[str, Any]
    """What must be alike on all hosts: flag -> value."""
    secret: str = field(default="", repr=False)
    """The cluster's, beside certificates."""

    def problem(self, ours: Mapping[str, Any]) -> str:
        """Why it cannot take part; empty: it can."""
        for flag in {**ours, **self.settings}:
            here, there = ours.get(flag), self.settings.get(flag)
            if here != there:
                where = f"on rank {self.rank}'s host and {here!r} on rank 0's"
                return f"{flag} is {there!r} {where}: make them equal"
        return ""


@dataclass(frozen=True, slots=True)
class Answer:
    """To a Join."""

    store: tuple[str, int]
    """Where the communicators meet."""
    refused: str = ""
    """Why the rank cannot take part; empty: it can."""


def versions() -> dict[str, str]:
    """What messages between ranks depend on."""
    return {
        "the version of Baton": baton.__version__,
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        "the version of torch": metadata.version("torch"),
    }


class Master:
    """Rank 0's side. Connections that prove nothing are closed."""

    def __init__(
        self,
        host: str,
        port: int,
        cluster: ClusterCredentials,
        expected: Collection[tuple[int, str]],
        settings: Mapping[str, Any],
    ) -> None:
        """`expected`: rank and purpose of each connection; `settings`: see Join. Raises JoinError and
        BatonError."""
        self._secret, self._settings = cluster.secret, settings
        self._tls = _tls(cluster).ssl_context(server=True)
        self._tls.num_tickets = 0  # connections are not resumed
        self._expected = set(expected)
        self._joined: dict[tuple[int, str], Channel] = {}
        self._changed = threading.Condition()
        self._refused = ""
        self._closed = False
        self._slots = threading.Semaphore(MAX_HANDSHAKES)
        self._store = "", 0
        try:
            self._listener = socket.create_server(
                (host, port), family=family_of(host), backlog=MAX_HANDSHAKES
            )
        except (OSError, OverflowError) as error:
            address = join_address(host, port)
            raise JoinError(
                f"--master: cannot listen at {address}: {error}; name a free port of this host"
            ) from None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self, store: tuple[str, int]) -> None:
        """`store`: see Answer."""
        self._store = store
        threading.Thread(target=self._accept, name="ranks of other hosts", daemon=True).start()

    def await_all(
        self, seconds: float = JOIN_SECONDS, stopping: threading.Event | None = None
    ) -> dict[tuple[int, str], Channel]:
        """Every expected connection. `stopping`: ends the wait when it is set. Raises JoinError."""
        deadline, stopping = time.monotonic() + seconds, stopping or threading.Event()
        with self._changed:
            while self._missing and not self._refused and (left := deadline - time.monotonic()) > 0:
                if stopping.is_set():
                    raise JoinError("stopped before all ranks of other hosts had come")
                self._changed.wait(min(left, RETRY_SECONDS))
            if self._refused:
                raise JoinError(self._refused)
            if missing := sorted({rank for rank, _ in self._missing}):
                names = ", ".join(map(str, missing))
                raise JoinError(
                    f"rank {names} of other hosts did not come within {seconds:g} s: start the same command "
                    "with --node-rank there, and see that --master can be reached"
                )
            return dict(self._joined)

    @property
    def _missing(self) -> set[tuple[int, str]]:
        return self._expected - self._joined.keys()

    def close(self) -> None:
        """Listens no more; connections stay."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            self._slots.acquire()  # each handshake ends in time; who comes meanwhile waits in the backlog
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed; or for now, such as too many open files
                self._slots.release()
                time.sleep(RETRY_SECONDS)
                continue
            threading.Thread(target=self._handshake, args=(connection, address[0]), daemon=True).start()

    def _handshake(self, connection: socket.socket, peer: str) -> None:
        try:
            self._take(connection, peer)
        except (OSError, ValueError, msgspec.DecodeError, ChannelError) as error:
            _log.warning("a connection to the ranks' port was refused", peer=peer, error=str(error))
            connection.close()
        finally:
            self._slots.release()

    def _take(self, connection: socket.socket, peer: str) -> None:
        """Raises OSError, ChannelError, msgspec.DecodeError, and ValueError for a rank that is refused."""
        connection.settimeout(HANDSHAKE_SECONDS)
        channel = _channel(self._tls.wrap_socket(connection, server_side=True))
        try:
            join = msgspec.json.decode(channel.receive_bytes(HANDSHAKE_SECONDS), type=Join)
            problem = self._add(join, channel) if same(join.secret, self._secret) else OTHER_SECRET
            channel.send_bytes(msgspec.json.encode(Answer(self._store, problem)))
        except BaseException:
            channel.close()
            raise
        if problem:
            channel.close()
            raise ValueError(problem)
        _log.info("a rank of another host has come", rank=join.rank, peer=peer, purpose=join.purpose)

    def _add(self, join: Join, channel: Channel) -> str:
        """Why it cannot take part, which ends the wait for the others; empty: it can."""
        key, problem = (join.rank, join.purpose), join.problem(self._settings)
        with self._changed:
            if not problem and key not in self._missing:
                problem = f"rank {join.rank} has come already: give each host its own --node-rank"
            if problem:
                self._refused = problem
            else:
                self._joined[key] = channel
            self._changed.notify_all()
        return problem


@dataclass(frozen=True, slots=True)
class Joined:
    channel: Channel
    store: tuple[str, int]
    own_address: str
    """This host's address towards rank 0's."""


def join(
    host: str, port: int, cluster: ClusterCredentials, what: Join, seconds: float = JOIN_SECONDS
) -> Joined:
    """A follower's side: waits until rank 0's host listens there. Raises JoinError."""
    address, deadline = join_address(host, port), time.monotonic() + seconds
    tls = _tls(cluster)
    try:
        context = tls.ssl_context(server=False)
    except BatonError as error:
        raise JoinError(error.message) from None
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(f"--master {address} cannot be reached: {error}") from None
        time.sleep(RETRY_SECONDS)
    try:
        connection.settimeout(TURN_SECONDS)
        connection = context.wrap_socket(connection, server_hostname=tls.name or host)
        return _introduce(connection, what)
    except ssl.SSLCertVerificationError as error:
        connection.close()
        why = OTHER_SECRET if cluster.tls is None else f"its certificate is not valid: {error.verify_message}"
        raise JoinError(f"--master {address}: {why}") from None
    except (OSError, ChannelError, ValueError, msgspec.DecodeError) as error:
        connection.close()
        raise JoinError(f"--master {address}: {error}") from None


def _introduce(connection: socket.socket, what: Join) -> Joined:
    name = str(connection.getsockname()[0])
    channel = _channel(connection)
    try:
        channel.send_bytes(msgspec.json.encode(what))
        answer = msgspec.json.decode(channel.receive_bytes(HANDSHAKE_SECONDS), type=Answer)
        if answer.refused:
            raise ValueError(answer.refused)
    except BaseException:
        channel.close()
        raise
    return Joined(channel, answer.store, name)


def _tls(cluster: ClusterCredentials) -> ClusterTls:
    return cluster.tls or tls_of_secret(cluster.secret)


def _channel(connection: socket.socket) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return Channel(connection, SEND_SECONDS)


NAME = "ranks.baton"


def tls_of_secret(secret: str) -> ClusterTls:
    """Equal secrets give the same bytes: an Ed25519 key by HKDF (RFC 5869), and its self-signed certificate,
    which is its own CA. Who connects can try guesses of the secret elsewhere, so it must be random."""
    seed = HKDF(SHA256(), 32, salt=None, info=b"baton ranks").derive(secret.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59))  # RFC 5280, 4.1.2.5: none is known
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, None)
        .public_bytes(Encoding.PEM)
    )
    return ClusterTls(cert, cert, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), NAME)
