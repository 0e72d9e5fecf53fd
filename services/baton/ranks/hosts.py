"""How the ranks of a worker on several hosts find rank 0, and prove to each other that they belong together.

Rank 0's host listens at the address that all name, until every other rank has come. Both sides prove that
they know the cluster secret, by HMACs over both sides' random numbers; it never travels. All further messages
are sealed with keys made of it (`channel.Seal`). They are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import platform
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import baton
from baton.ranks.channel import Channel, ChannelError, Seal
from baton.rpc.address import family_of, join_address
from baton.rpc.logs import get_logger

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
MAGIC = b"BATONRK1"
NONCE = 32
PLANS, PAGES = "plans", "pages"
"""What a connection is for."""

_log = get_logger()


class JoinError(Exception):
    """The hosts of a worker do not come together. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class Join:
    """What a rank says when it comes."""

    rank: int
    purpose: str
    settings: Mapping[str, Any]
    """What must be alike on all hosts: flag -> value."""

    def problem(self, ours: Mapping[str, Any]) -> str:
        """Why it cannot take part; empty: it can."""
        for flag in {**ours, **self.settings}:
            here, there = ours.get(flag), self.settings.get(flag)
            if here != there:
                where = f"on rank {self.rank}'s host and {here!r} on rank 0's"
                return f"{flag} is {there!r} {where}: make them equal"
        return ""


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
        secret: str,
        expected: Collection[tuple[int, str]],
        settings: Mapping[str, Any],
    ) -> None:
        """`expected`: rank and purpose of each connection; `settings`: see Join. Raises JoinError."""
        self._secret, self._settings = secret.encode(), settings
        self._expected = set(expected)
        self._joined: dict[tuple[int, str], Channel] = {}
        self._changed = threading.Condition()
        self._refused = ""
        self._closed = False
        self._slots = threading.Semaphore(MAX_HANDSHAKES)
        self._reply = b""
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

    def start(self, reply: Mapping[str, Any]) -> None:
        """`reply`: what ranks are told when they are accepted; plain data."""
        self._reply = json.dumps(reply).encode()
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
                own, address = self._listener.accept()
            except OSError:  # closed; or for now, such as too many open files
                self._slots.release()
                time.sleep(RETRY_SECONDS)
                continue
            threading.Thread(target=self._handshake, args=(own, address[0]), daemon=True).start()

    def _handshake(self, own: socket.socket, peer: str) -> None:
        try:
            self._take(own, peer)
        except (OSError, ValueError, KeyError, TypeError, ChannelError) as error:
            _log.warning("a connection to the ranks' port was refused", peer=peer, error=str(error))
            own.close()
        finally:
            self._slots.release()

    def _take(self, own: socket.socket, peer: str) -> None:
        """Raises OSError and ChannelError; ValueError, KeyError or TypeError for what no rank says."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        hello = _read(own, len(MAGIC) + NONCE, deadline)
        if not hello.startswith(MAGIC):
            raise ValueError("it is not a rank of a worker")
        nonces = hello[len(MAGIC) :] + secrets.token_bytes(NONCE)
        own.sendall(nonces[NONCE:] + _proof(self._secret, b"master", nonces))
        if not hmac.compare_digest(_read(own, NONCE, deadline), _proof(self._secret, b"rank", nonces)):
            raise ValueError("it has another cluster secret: give both the same --cluster-secret-file")
        channel = _channel(own, self._secret, nonces, master=True)
        try:
            said = json.loads(bytes(channel.receive_bytes(HANDSHAKE_SECONDS)))
            join = Join(said["rank"], said["purpose"], said["settings"])  # another version may say more
            key = join.rank, join.purpose
            problem = join.problem(self._settings)
            with self._changed:
                if not problem and key not in self._missing:
                    problem = f"rank {join.rank} has come already: give each host its own --node-rank"
                if problem:
                    self._refused = problem
                else:
                    self._joined[key] = channel
                self._changed.notify_all()
            channel.send_bytes(json.dumps({"refused": problem}).encode() if problem else self._reply)
        except BaseException:
            channel.close()
            raise
        if problem:
            channel.close()
        else:
            _log.info("a rank of another host has come", rank=join.rank, peer=peer, purpose=join.purpose)


@dataclass(frozen=True, slots=True)
class Joined:
    channel: Channel
    reply: Mapping[str, Any]
    own: str
    """This host's address towards rank 0's."""


def join(host: str, port: int, secret: str, what: Join, seconds: float = JOIN_SECONDS) -> Joined:
    """A follower's side: waits until rank 0's host listens there. Raises JoinError."""
    address, deadline = join_address(host, port), time.monotonic() + seconds
    while True:
        try:
            own = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(f"--master {address} cannot be reached: {error}") from None
        time.sleep(RETRY_SECONDS)
    try:
        return _introduce(own, secret.encode(), what)
    except (OSError, ChannelError, ValueError) as error:
        own.close()
        raise JoinError(f"--master {address}: {error}") from None


def _introduce(own: socket.socket, secret: bytes, what: Join) -> Joined:
    nonce = secrets.token_bytes(NONCE)
    own.sendall(MAGIC + nonce)
    answer = _read(own, 2 * NONCE, time.monotonic() + TURN_SECONDS)
    nonces = nonce + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(secret, b"master", nonces)):
        raise ValueError("rank 0 has another cluster secret: give both the same --cluster-secret-file")
    own.sendall(_proof(secret, b"rank", nonces))
    name = str(own.getsockname()[0])
    channel = _channel(own, secret, nonces, master=False)
    try:
        hello = {"rank": what.rank, "purpose": what.purpose, "settings": dict(what.settings)}
        channel.send_bytes(json.dumps(hello).encode())
        reply = json.loads(bytes(channel.receive_bytes(HANDSHAKE_SECONDS)))
        if "refused" in reply:
            raise ValueError(str(reply["refused"]))
    except BaseException:
        channel.close()
        raise
    return Joined(channel, reply, name)


def _channel(own: socket.socket, secret: bytes, nonces: bytes, master: bool) -> Channel:
    own.setblocking(True)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        own.setsockopt(socket.IPPROTO_TCP, option, value)
    keys = [_proof(secret, name, nonces) for name in (b"from master", b"from rank")]
    return Channel(own, SEND_SECONDS, Seal(*(keys if master else keys[::-1])))


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + nonces, "sha256")


def _read(own: socket.socket, count: int, deadline: float) -> bytes:
    """Raises OSError, and ValueError if the connection ends before."""
    data = b""
    while len(data) < count:
        # However slowly it comes.
        own.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := own.recv(count - len(data))):
            raise ValueError("it closed the connection during the handshake")
        data += more
    return data
