"""Names of cached pages that tell nothing of their tokens: see proto/baton/v1/cache.proto. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

DIGEST_BYTES = 8
TOKEN_BYTES = array("I").itemsize


def root_digest(page_size: int, namespace: str) -> bytes:
    """What the first page of a sequence follows."""
    seed = page_size.to_bytes(4, "little") + namespace.encode("utf-8", "surrogatepass")
    return blake2b(seed, digest_size=DIGEST_BYTES).digest()


def chain(previous: bytes, key: bytes, stride: int) -> Iterator[bytes]:
    """Digests of consecutive pages that follow `previous`. `key`: their tokens, `stride` bytes a page."""
    if sys.byteorder != "little":
        swapped = array("I", key)
        swapped.byteswap()
        key = swapped.tobytes()
    for offset in range(0, len(key), stride):
        previous = blake2b(previous + key[offset : offset + stride], digest_size=DIGEST_BYTES).digest()
        yield previous


def as_number(digest: bytes) -> int:
    """As messages carry it."""
    return int.from_bytes(digest, "little")


class PromptDigests:
    """Digests of a prompt's pages, each computed when it is first asked for."""

    def __init__(self, tokens: Sequence[int], namespace: str, page_size: int) -> None:
        """Raises OverflowError for a token id below 0 or from 2**32 on."""
        # At least one token of a prompt is computed, for its logits: the page it ends with never counts.
        self.pages = max(0, len(tokens) - 1) // page_size
        key = array("I", tokens[: self.pages * page_size]).tobytes()
        self._chain = chain(root_digest(page_size, namespace), key, page_size * TOKEN_BYTES)
        self._known: list[int] = []

    def __getitem__(self, page: int) -> int:
        """Raises IndexError beyond `pages`."""
        while page >= len(self._known):
            try:
                self._known.append(as_number(next(self._chain)))
            except StopIteration:
                raise IndexError(page) from None
        return self._known[page]
