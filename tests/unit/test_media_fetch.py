"""Images by address: what is fetched, and from where nothing ever is."""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import asynccontextmanager

import pytest
import trustme

from baton.gateway import media_fetch
from baton.gateway.media_fetch import MediaFetcher, is_public
from baton.pictures.data_uri import MOST_BYTES
from baton.pictures.settings import PictureError

PUBLIC = "93.184.216.34"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nimage"


@pytest.fixture
def authority(monkeypatch):
    made = trustme.CA()
    context = ssl.create_default_context()
    made.configure_trust(context)
    monkeypatch.setattr(media_fetch, "_tls", lambda: context)
    return made


@asynccontextmanager
async def host(authority, answer, name="images.example"):
    """A server over TLS. answer: bytes, or what writes them. Yields a fetcher of its host, whose name has a
    public address that leads here; what was asked; and addresses that were connected to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    asked, connected = [], []

    async def serve(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if callable(answer):
            await answer(writer)
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def resolve(host, port):
        return [PUBLIC]

    async def connect(address, _, context, host):
        connected.append(address)
        return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host)

    made = MediaFetcher(["Images.example", "other.example:8443"], resolve=resolve, connect=connect, seconds=2)
    try:
        yield made, asked, connected
    finally:
        server.close()


async def refused(fetcher, url, why):
    with pytest.raises(PictureError, match=why) as caught:
        await fetcher.fetch(url)
    assert "\n" not in str(caught.value)


async def test_a_named_host_is_asked_once_for_what_the_address_says(authority):
    async with host(authority, OK) as (fetcher, asked, connected):
        assert await fetcher.fetch("https://images.example/a.png?b=c#d") == b"image"
        assert asked[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\nhost: images.example\r\n")
        assert b"cookie" not in asked[0].lower() and connected == [PUBLIC]
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nima\r\n2\r\nge\r\n0\r\n\r\n"
    async with host(authority, chunked) as (fetcher, _, _):
        assert await fetcher.fetch("https://IMAGES.example") == b"image"


NOT_ASKED = {
    "http://images.example/a": "only https: is",
    "file:///etc/passwd": "only https: is",
    "ftp://images.example/a": "only https: is",
    "https://evil.example/a": "--media-hosts does not name",
    "https://images.example.evil.example/a": "--media-hosts does not name",
    "https://evil.example/https://images.example/": "--media-hosts does not name",
    "https://images.example:8443/a": "--media-hosts does not name",
    "https://other.example/a": "--media-hosts does not name",
    "https://images.example./a": "--media-hosts does not name",
    "https://user@images.example/a": "user's name",
    "https://evil.example@images.example/a": "user's name",
    "https://images.example\\@evil.example/a": "cannot be used",
    "https://images.example:99999/a": "cannot be used",
    "https://images.example/a b": "cannot be used",
    "https://images.example/\r\nhost: evil": "cannot be used",
    "https://imágenes.example/": "cannot be used",
    "https://[::1/a": "cannot be used",
    "https:": "--media-hosts does not name",
    "https://images.example/" + "a" * 5000: "cannot be used",
    "https://images.example@169.254.169.254/": "user's name",
    "https://images.example:443@169.254.169.254/": "user's name",
    "https://169.254.169.254#@images.example/": "--media-hosts does not name",
    "https://169.254.169.254?@images.example/": "--media-hosts does not name",
    # Other digits and dots, which a resolver may take for these.
    "https://\uff11\uff16\uff19.254.169.254/": "cannot be used",
    "https://169\u3002254\u3002169\u3002254/": "cannot be used",
    "https://169\uff0e254\uff0e169\uff0e254/": "cannot be used",
    "https://\u2460\u2465\u2468.254.169.254/": "cannot be used",
    "https://images\u3002example/": "cannot be used",
    "https://images.example\u2044@evil/": "cannot be used",
    "https://%31%36%39.254.169.254/": "--media-hosts does not name",
    # Metadata services, in all spellings: none is a host that anybody named.
    **dict.fromkeys(
        (
            "https://169.254.169.254/latest/meta-data",
            "https://2852039166/",
            "https://0xA9FEA9FE/",
            "https://0xA9.0xFE.0xA9.0xFE/",
            "https://0251.0376.0251.0376/",
            "https://169.254.43518/",
            "https://[::ffff:169.254.169.254]/",
            "https://[::ffff:a9fe:a9fe]/",
            "https://[::169.254.169.254]/",
            "https://[::a9fe:a9fe]/",
            "https://[0:0:0:0:0:ffff:a9fe:a9fe]/",
            "https://[64:ff9b::a9fe:a9fe]/",
            "https://[fe80::a9fe:a9fe%25eth0]/",
            "https://169.254.169.254./",
            "https://169.254.169.254:443/",
            "https://169.16689662/",
            "https://0xA9FEA9FE:443/",
            "https://0251.0xFE.43518/",
            "https://00000251.00000376.000251.000376/",
            "https://metadata.google.internal./",
            "https://169.254.169.254.nip.io/",
            "https://[fd00:ec2::254]/",
            "https://metadata.google.internal/",
            "https://127.1/",
            "https://0/",
            "https://localhost/",
        ),
        "--media-hosts does not name",
    ),
}


@pytest.mark.parametrize("url", NOT_ASKED)
async def test_nobody_is_asked_for_other_addresses(url):
    async def never(*_):
        raise AssertionError("asked")

    fetcher = MediaFetcher(["images.example", "other.example:8443"], resolve=never, connect=never)
    await refused(fetcher, url, NOT_ASKED[url])


PRIVATE = [
    *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "255.255.255.255", "192.0.0.1", "198.18.0.1", "240.0.0.1", "::1", "::", "fe80::1"),
    *("fe80::1%eth0", "fd00:ec2::254", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254"),
    *(
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ),
    *("2001:db8::1", "::169.254.169.254", "::127.0.0.1", "100::1", "5f00::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_named_host_with_an_address_that_is_not_public_is_not_connected_to(address):
    assert not is_public(address)

    async def never(*_):
        raise AssertionError("connected")

    for found in ([address], [PUBLIC, address], [address, PUBLIC]):

        async def resolve(host, port, found=found):
            return found

        fetcher = MediaFetcher(["localhost"], resolve=resolve, connect=never)
        await refused(fetcher, "https://localhost/a", "not on the public internet")


def test_public_addresses_are_public():
    assert all(map(is_public, (PUBLIC, "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:830::200e")))


async def test_names_of_this_machine_are_not_public():
    fetcher = MediaFetcher(["localhost", "127.0.0.1", "2130706433", "0x7f000001"])
    for name in ("localhost", "127.0.0.1", "2130706433", "0x7f000001"):
        await refused(fetcher, f"https://{name}/a", "not on the public internet|not known")


async def test_a_name_that_changes_its_address_is_resolved_once(authority):
    answers = [[PUBLIC], ["127.0.0.1"]]

    async def resolve(host, port):
        return answers.pop(0)

    async with host(authority, OK) as (fetcher, _, connected):
        fetcher._resolve = resolve
        assert await fetcher.fetch("https://images.example/a") == b"image"
        assert connected == [PUBLIC] and len(answers) == 1
        await refused(fetcher, "https://images.example/a", "not on the public internet")
        assert connected == [PUBLIC]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(authority, status):
    answer = b"HTTP/1.1 %d X\r\nlocation: https://images.example/b\r\ncontent-length: 0\r\n\r\n" % status
    async with host(authority, answer) as (fetcher, asked, _):
        await refused(
            fetcher, "https://images.example/a", f"answers {status}, and redirects are not followed"
        )
        assert len(asked) == 1


async def test_a_certificate_is_of_the_name(authority):
    async with host(authority, OK, name="evil.example") as (fetcher, asked, _):
        await refused(fetcher, "https://images.example/a", "certificate|not valid for|mismatch")
        assert not asked
    async with host(trustme.CA(), OK) as (fetcher, asked, _):
        await refused(fetcher, "https://images.example/a", "certificate|self")
        assert not asked


async def test_size_and_time_have_limits(authority):
    async def endless(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(2**16))
            await writer.drain()

    async def slow(writer):
        for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + bytes(1000):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async def headers(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-a: " + b"b" * 2**16 + b"\r\n")
            await writer.drain()

    for answer, why in (
        (endless, f"more than {MOST_BYTES:,} bytes"),
        (slow, "within 2 s"),
        (headers, "cannot be fetched"),
        (b"", "closes the connection|cannot be fetched"),
        (b"SSH-2.0-x\r\n", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nx", "cannot be fetched"),
        (b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n", "answers 404"),
    ):
        async with host(authority, answer) as (fetcher, _, _):
            began = time.monotonic()
            await refused(fetcher, "https://images.example/a", why)
            assert time.monotonic() - began < 8
