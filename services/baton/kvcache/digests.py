"""Names of cached pages that tell nothing of their tokens: see proto/baton/v1/cache.proto. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 8


def root_digest(page_size: int, namespace: str) -> bytes:
    """What the first page of a sequence follows."""
    seed = page_size.to_bytes(4, "little") + namespace.encode("utf-8", "surrogatepass")
    return blake2b(seed, digest_size=DIGEST_BYTES).digest()


def next_digest(previous: bytes, page: bytes) -> bytes:
    """Of the page that follows the one of digest `previous`. `page`: its tokens, as an array("I") has
    them."""
    if sys.byteorder != "little":
        swapped = array("I", page)
        swapped.byteswap()
        page = swapped.tobytes()
    return blake2b(previous + page, digest_size=DIGEST_BYTES).digest()


def as_number(digest: bytes) -> int:
    """As messages carry it."""
    return int.from_bytes(digest, "little")


class PromptDigests:
    """Digests of a prompt's pages, each computed when it is first asked for."""

    def __init__(self, tokens: Sequence[int], namespace: str, page_size: int) -> None:
        """Token ids: 0 <= id < 2**32."""
        # At least one token of a prompt is computed, for its logits: the page it ends with never counts.
        self.pages = max(0, len(tokens) - 1) // page_size
        self._tokens = tokens
        self._page_size = page_size
        self._last = root_digest(page_size, namespace)
        self._known: list[int] = []

    def __getitem__(self, page: int) -> int:
        """Raises IndexError beyond `pages`."""
        if not 0 <= page < self.pages:
            raise IndexError(page)
        while page >= len(self._known):
            start = len(self._known) * self._page_size
            tokens = array("I", self._tokens[start : start + self._page_size])
            self._last = next_digest(self._last, tokens.tobytes())
            self._known.append(as_number(self._last))
        return self._known[page]
