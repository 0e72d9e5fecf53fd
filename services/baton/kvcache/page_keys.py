"""What the prefix tree compares of a page: its tokens and, where a model takes images, the images' digests.

A placeholder of an image is one integer that holds the image's whole digest and the token's index in the
image. Token ids have 32 bits, placeholders more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

DIGEST_BYTES = 32
"""Bytes of an image's digest, and of a page's seal."""
_NO_IMAGES = bytes(DIGEST_BYTES)
_MARK = 2**31
"""Set in the 4 bytes of a placeholder, whose other bits are its index."""


def placeholder(digest: bytes, index: int) -> int:
    """The token at `index` of an image of this digest."""
    return int.from_bytes(b"\x01" + digest, "big") << 32 | _MARK | index


def is_placeholder(token: int) -> bool:
    return token >> 32 > 0


def page_key(tokens: Sequence[int], page_size: int, sealed: bool) -> bytes:
    """The tokens of each whole page, as bytes of an array("I"). `sealed`: behind them 32 bytes, which are
    zeros where the page has no placeholders, else the SHA-256 of the digest of each of its tokens (of
    text 0).

    Raises OverflowError for what is no token id, and for placeholders where nothing is sealed.
    """
    tokens = tokens[: len(tokens) // page_size * page_size]
    seals: list[bytes] | None = None
    try:
        plain = array("I", tokens).tobytes()
    except OverflowError:
        if not sealed:
            raise
        seals = [_seal(tokens[at : at + page_size]) for at in range(0, len(tokens), page_size)]
        words = [token & 0xFFFFFFFF if is_placeholder(token) else token for token in tokens]
        plain = array("I", words).tobytes()
    if not sealed:
        return plain
    width = page_size * array("I").itemsize
    pages = range(len(tokens) // page_size)
    return b"".join(
        plain[at * width : (at + 1) * width] + (_NO_IMAGES if seals is None else seals[at]) for at in pages
    )


def _seal(page: Sequence[int]) -> bytes:
    digests = [token >> 32 for token in page]
    if not any(digests):
        return _NO_IMAGES
    return sha256(b"".join(digest.to_bytes(DIGEST_BYTES + 1, "big") for digest in digests)).digest()


def without_seal(key: bytes, page_size: int) -> bytes:
    """A page's key; if it has no placeholders, its tokens alone."""
    width = page_size * array("I").itemsize
    return key[:width] if key[width:] == _NO_IMAGES else key
