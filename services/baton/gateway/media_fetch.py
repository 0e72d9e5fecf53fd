"""Images by address: https only, of hosts that the operator names, and never of a private network.

A name is resolved once, every address that it has must be public, and the connection goes to one of these
addresses: a name that means another address a moment later (DNS rebinding) gains nothing. Redirects are not
followed.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import h11

from baton.pictures.data_uri import MOST_BYTES
from baton.pictures.settings import PictureError

SECONDS = 10.0
"""The longest that an image may take, from its name's resolution to its last byte."""
MOST_CHARACTERS = 4096
"""Characters of an address."""
READ_BYTES = 2**16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Connect = Callable[[str, int, ssl.SSLContext, str], Awaitable[Streams]]


class MediaFetcher:
    """Used on one event loop only."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        seconds: float = SECONDS,
    ) -> None:
        """hosts: names, or name:port, that images may be fetched from. resolve, connect: for tests."""
        self._hosts = {each.lower() for each in hosts}
        self._resolve = resolve or _resolve
        self._connect = connect or _connect
        self._seconds = seconds

    async def fetch(self, url: str) -> bytes:
        """Raises PictureError."""
        host, port, target = self._parts(url)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._fetch(host, port, target)
        except TimeoutError:
            raise PictureError(f"did not arrive within {self._seconds:g} s") from None
        except (OSError, h11.ProtocolError) as error:  # of certificates as well
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error
            raise PictureError(f"cannot be fetched: {' '.join(str(why).split())[:200]}") from None

    def _parts(self, url: str) -> tuple[str, int, str]:
        """Host, port and what is asked for. Raises PictureError."""
        try:
            if (
                len(url) > MOST_CHARACTERS
                or not url.isascii()
                or not url.isprintable()
                or set(url) & set(" \\")
            ):
                raise ValueError
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or 443
        except ValueError:
            raise PictureError("is an address that cannot be used") from None
        if parts.scheme != "https":
            raise PictureError("is an address of a kind that is not fetched: only https: is")
        if parts.username is not None or parts.password is not None:
            raise PictureError("is an address with a user's name, which is not fetched")
        if host not in self._hosts if port == 443 else f"{host}:{port}" not in self._hosts:
            raise PictureError(
                "is an address of a host that --media-hosts does not name: send the image itself"
            )
        return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    async def _fetch(self, host: str, port: int, target: str) -> bytes:
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise PictureError("is an address of a host that is not on the public internet")
        context = _tls()
        last: OSError | None = None
        for address in addresses:
            try:
                reader, writer = await self._connect(address, port, context, host)
            except ssl.SSLError:
                raise
            except OSError as error:
                last = error
                continue
            try:
                return await _get(reader, writer, host if port == 443 else f"{host}:{port}", target)
            finally:
                writer.transport.abort()
        raise last or OSError("no address answers")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet's, and not a private one in another form."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not found.is_multicast
    # 2000::/3 is all that is given out; within it, 6to4 and Teredo hold addresses of IPv4.
    given_out = found in ipaddress.ip_network("2000::/3")
    return given_out and found.is_global and found.sixtofour is None and found.teredo is None


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _resolve(host: str, port: int) -> Sequence[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise PictureError("is an address of a host whose name is not known") from None
    return [str(where[0]) for _, _, _, _, where in found]


async def _connect(address: str, port: int, context: ssl.SSLContext, host: str) -> Streams:
    return await asyncio.open_connection(address, port, ssl=context, server_hostname=host)


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str) -> bytes:
    http = h11.Connection(h11.CLIENT)
    headers = [
        ("host", host),
        ("accept", "image/*"),
        ("accept-encoding", "identity"),
        ("user-agent", "baton"),
        ("connection", "close"),
    ]
    asked = http.send(h11.Request(method="GET", target=target, headers=headers))
    writer.write((asked or b"") + (http.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    body = bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Response):
            if event.status_code != 200:
                follow = ", and redirects are not followed" if 300 <= event.status_code < 400 else ""
                raise PictureError(f"cannot be fetched: its host answers {event.status_code}{follow}")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MOST_BYTES:
                raise PictureError(f"has more than {MOST_BYTES:,} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif isinstance(event, h11.ConnectionClosed):
            raise PictureError("cannot be fetched: its host closes the connection")
