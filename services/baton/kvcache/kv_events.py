"""The changes of a prefix tree, numbered, for observers elsewhere. Pages are named by digests, which tell
nothing of their tokens: see proto/baton/v1/cache.proto. Pure."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from baton.kvcache.page_keys import page_key, without_seal

DIGEST_BYTES = 8
CONTENT_BYTES = 32


def root_digest(page_size: int, namespace: str) -> bytes:
    """What the first page of a sequence follows."""
    seed = page_size.to_bytes(4, "little") + namespace.encode("utf-8", "surrogatepass")
    return blake2b(seed, digest_size=DIGEST_BYTES).digest()


def next_digest(previous: bytes, page: bytes) -> bytes:
    """Digest of the page that follows the one of digest `previous`. `page`: its key, without a seal where it
    has no image."""
    return blake2b(previous + _little_endian(page), digest_size=DIGEST_BYTES).digest()


def _little_endian(tokens: bytes) -> bytes:
    """`tokens`: as an array("I") has them."""
    if sys.byteorder == "little":
        return tokens
    swapped = array("I", tokens)
    swapped.byteswap()
    return swapped.tobytes()


def content_digest(page_size: int, namespace: str, key: bytes) -> bytes:
    """32 bytes that name the contents of whole pages: see ChunkReady.content. `key`: their tokens, as an
    array("I") has them."""
    name = namespace.encode("utf-8", "surrogatepass")
    begin = page_size.to_bytes(4, "little") + len(name).to_bytes(4, "little") + name
    return blake2b(begin + _little_endian(key), digest_size=CONTENT_BYTES).digest()


def as_number(digest: bytes) -> int:
    """A digest in the form of messages."""
    return int.from_bytes(digest, "little")


class PromptDigests:
    """Digests of a prompt's pages, each computed when it is first asked for."""

    def __init__(self, tokens: Sequence[int], namespace: str, page_size: int) -> None:
        """Token ids: 0 <= id < 2**32, or placeholders of images."""
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
            tokens = self._tokens[start : start + self._page_size]
            key = without_seal(page_key(tokens, self._page_size, True), self._page_size)
            self._last = next_digest(self._last, key)
            self._known.append(as_number(self._last))
        return self._known[page]


MAX_EVENTS = 16384
"""Events that wait to be taken: what a tree does within seconds."""
MAX_CHANGES = 16384
"""Pages whose changes are remembered; who is further behind gets a snapshot."""


@dataclass(frozen=True, slots=True)
class Stored:
    """`rows` hold the tokens of `key`, and follow row `after`; None: they begin a sequence."""

    after: int | None
    namespace: str
    key: bytes
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    rows: tuple[int, ...]


POOL, HOST = 0, 1
"""Tiers: the pool that steps use, and the one in the host's memory."""


class TreeEvents:
    """A tree's observer: keeps events until `take`, which another thread may call."""

    def __init__(self, limit: int = MAX_EVENTS) -> None:
        """limit: events that wait at most, beside those of what was present at first: else a large tree
        could never be followed."""
        self.overflown = False
        """Events were dropped, because they were not taken in time."""
        self._limit = limit
        self._most = sys.maxsize
        self._waiting: deque[Stored | Removed] = deque()

    def stored(self, after: int | None, namespace: str, key: bytes, rows: Sequence[int]) -> None:
        self._put(Stored(after, namespace, key, tuple(rows)))

    def removed(self, rows: Sequence[int]) -> None:
        self._put(Removed(tuple(rows)))

    def all_reported(self) -> None:
        self._most = len(self._waiting) + self._limit

    def _put(self, event: Stored | Removed) -> None:
        if self.overflown or len(self._waiting) >= self._most:
            self.overflown = True
            self._waiting.clear()
        else:
            self._waiting.append(event)

    def take(self) -> Stored | Removed | None:
        """The oldest; None: there is none."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None


@dataclass(frozen=True, slots=True)
class TreeChanges:
    """From the state after change `after` to that after `sequence`: digests, none of them in both. snapshot:
    `stored` is all there is; `host_stored` in the host tier."""

    after: int
    sequence: int
    stored: tuple[int, ...]
    removed: tuple[int, ...] = ()
    snapshot: bool = False
    host_stored: tuple[int, ...] = ()
    host_removed: tuple[int, ...] = ()


class RowDigests:
    """Digests of a tree's rows, by the rows' ids."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.held: dict[int, bytes] = {}

    def stored(self, event: Stored) -> list[bytes]:
        """Those of its rows."""
        after = event.after
        last = root_digest(self.page_size, event.namespace) if after is None else self.held[after]
        stride = len(event.key) // len(event.rows)
        found = []
        for index, row in enumerate(event.rows):
            key = without_seal(event.key[index * stride : (index + 1) * stride], self.page_size)
            last = next_digest(last, key)
            self.held[row] = last
            found.append(last)
        return found

    def removed(self, event: Removed) -> list[bytes]:
        """Those that its rows had."""
        return [self.held.pop(row) for row in event.rows]


class TreeLog:
    """What a worker's trees hold, by digest, after each of their changes, and the last of these. One change
    is one page index that came to a tier or went; that a window group has given its page up is no change."""

    def __init__(self, page_size: int, limit: int = MAX_CHANGES) -> None:
        self.page_size = page_size
        self.sequence = 0
        """Number of the last change. Never falls, also by `clear`."""
        self._digests = (RowDigests(page_size), RowDigests(page_size))
        """Digests of each tier."""
        self._log: deque[tuple[int, int, bool]] = deque(maxlen=limit)
        """Tier, digest, and whether it came."""

    def apply(self, event: Stored | Removed, tier: int = POOL) -> None:
        known, came = self._digests[tier], isinstance(event, Stored)
        digests = known.stored(event) if isinstance(event, Stored) else known.removed(event)
        self.sequence += len(digests)
        self._log.extend((tier, as_number(digest), came) for digest in digests)

    def clear(self) -> None:
        """All is reported again. Watchers get a snapshot."""
        self.sequence += 1
        for tier in self._digests:
            tier.held.clear()
        self._log.clear()

    def since(self, sequence: int | None) -> TreeChanges:
        """All changes after this one, or a snapshot where they are not remembered. None: from nothing."""
        behind = self.sequence - sequence if sequence is not None else -1
        if sequence is None or not 0 <= behind <= len(self._log):
            pool, host = (tuple(map(as_number, tier.held.values())) for tier in self._digests)
            return TreeChanges(0, self.sequence, pool, snapshot=True, host_stored=host)
        # What came and went, or went and came back, is no change: the last word on each digest counts where
        # it differs from what there was before, which is the opposite of the first word.
        first: dict[tuple[int, int], bool] = {}
        last: dict[tuple[int, int], bool] = {}
        for tier, digest, came in islice(self._log, len(self._log) - behind, None):
            first.setdefault((tier, digest), came)
            last[tier, digest] = came
        found: dict[tuple[int, bool], list[int]] = {
            (t, came): [] for t in (POOL, HOST) for came in (True, False)
        }
        for (tier, digest), came in last.items():
            if came == first[tier, digest]:
                found[tier, came].append(digest)
        return TreeChanges(
            sequence,
            self.sequence,
            tuple(found[POOL, True]),
            tuple(found[POOL, False]),
            host_stored=tuple(found[HOST, True]),
            host_removed=tuple(found[HOST, False]),
        )
