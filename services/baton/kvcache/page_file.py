"""The files of the disk tier: one page each, which says itself what it holds. Pure.

A file is a header, the XXH3 of header and page, and the page. The reader knows the header that it wants, with
every token up to the page's end, and compares all of it: the name, a digest, only finds the file. The XXH3
tells what was torn or has rotted. It protects against accidents; that others cannot write the files is the
directory's matter.
"""

from __future__ import annotations

import struct
from hashlib import sha256

from xxhash import xxh3_64

_FIXED = struct.Struct("<8sIIQ32sII")
_MAGIC = b"BATON-KV"
_VERSION = 2
CHECKSUM_BYTES = 8


class PageNames:
    """Digests of a sequence's page indexes, of 32 bytes, each computed when it is first asked for. A digest
    stands for the files' version, the fingerprint, the namespace and all tokens up to the page's end."""

    def __init__(self, fingerprint: bytes, namespace: str, key: bytes, stride: int) -> None:
        """`key`: of whole pages, of `stride` bytes each."""
        self._key, self._stride = key, stride
        kind = _MAGIC + bytes([_VERSION]) + fingerprint
        self._known = [sha256(kind + namespace.encode("utf-8", "surrogatepass")).digest()]

    def name(self, row: int, group: int) -> str:
        """The file's, of this KV group's page at page index `row`."""
        while len(self._known) <= row + 1:
            begin = (len(self._known) - 1) * self._stride
            page = self._key[begin : begin + self._stride]
            self._known.append(sha256(self._known[-1] + page).digest())
        return f"{self._known[row + 1].hex()}-{group}"


def header(fingerprint: bytes, namespace: str, key: bytes, group: int, page_bytes: int) -> bytes:
    """`fingerprint`: 32 bytes, of model, layout and dtypes. `key`: of all pages up to this one's end, as
    `page_keys.page_key` has them."""
    name = namespace.encode("utf-8", "surrogatepass")
    fixed = _FIXED.pack(_MAGIC, _VERSION, group, page_bytes, fingerprint, len(name), len(key))
    return fixed + name + key


def sealed(head: bytes, page: memoryview) -> bytes:
    """What the file has before the page."""
    return head + _checksum(head, page)


def fault(head: bytes, found: bytes | bytearray, page: memoryview, size: int) -> str:
    """What is wrong with a file of `size` bytes that begins with `found` and goes on with `page`; empty:
    nothing. "other": it holds something else than `head` says; "damaged": its bytes have changed."""
    if size != len(head) + CHECKSUM_BYTES + len(page):
        return "damaged"
    if found[: len(head)] != head:
        return "other"
    return "" if found[len(head) :] == _checksum(head, page) else "damaged"


def _checksum(head: bytes, page: memoryview) -> bytes:
    """Lets other threads run meanwhile."""
    checksum = xxh3_64(head)
    checksum.update(page)
    return checksum.digest()


def begins_with(found: bytes, namespace: str, first: bytes) -> bool:
    """Whether a file that begins with `found` is of this namespace and its tokens begin with `first`."""
    name = namespace.encode("utf-8", "surrogatepass")
    if len(found) < _FIXED.size:
        return False
    fixed, (*_, named, _) = found[: _FIXED.size], _FIXED.unpack_from(found)
    return fixed.startswith(_MAGIC) and named == len(name) and found[_FIXED.size :].startswith(name + first)


def begin_bytes(namespace: str, first: bytes) -> int:
    """Bytes of a file that `begins_with` looks at."""
    return _FIXED.size + len(namespace.encode("utf-8", "surrogatepass")) + len(first)
