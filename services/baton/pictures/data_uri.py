"""Pictures inside JSON: the bytes themselves, as a data URI."""

from __future__ import annotations

import binascii

from baton.pictures.settings import PictureError

MOST_BYTES = 20 * 2**20
"""Bytes of a picture as it is sent."""
PIECE = 2**18
"""Characters."""


def from_data_uri(uri: str) -> bytes:
    """Raises PictureError."""
    scheme, _, rest = uri.partition(":")
    kind = scheme.strip().lower()
    if kind in ("http", "https"):
        raise PictureError(
            "is an address of a kind that is not fetched: send the picture itself (data:image/...)"
        )
    if kind != "data" or not rest:
        raise PictureError("is no data URI (data:image/...;base64,...), the only form that is taken")
    head, comma, body = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise PictureError("is a data URI without ;base64, which pictures need")
    return from_base64(body)


def from_base64(text: str) -> bytes:
    """Raises PictureError."""
    if len(text) * 3 // 4 > MOST_BYTES + 2:
        raise PictureError(f"has more than {MOST_BYTES:,} bytes")
    try:
        # Decoding holds the interpreter, which others need in between.
        pieces = (text[first : first + PIECE] for first in range(0, len(text), PIECE))
        found = [binascii.a2b_base64(piece, strict_mode=True) for piece in pieces]
    except (binascii.Error, ValueError):
        raise PictureError("is not valid base64") from None
    if any(len(piece) != PIECE // 4 * 3 for piece in found[:-1]):  # padding in the middle
        raise PictureError("is not valid base64")
    return b"".join(found)
