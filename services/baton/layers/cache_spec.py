"""What a layer keeps of a sequence, and for how long. Layers with equal declarations share KV groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Something of every token, in pages of so many tokens. Sizes are those of all ranks together."""

    heads: int = 1
    head_dim: int = 1
    parts: ClassVar[int] = 2
    """2: a key and a value of each head; 1: a latent."""
    kind: ClassVar[str] = "attention"
    """In baton.v1.KvGroup."""
    rows_may_lack: ClassVar[bool] = False
    """A row of the prefix tree may go on without this layer's page: pages are held and evicted one by one."""

    @property
    def values(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.parts * self.heads * self.head_dim

    def room(self, page_size: int, itemsize: int) -> int:
        """A layer's part of a page, in numbers of `itemsize` bytes for each of its tokens."""
        return self.values

    @property
    def window(self) -> int | None:
        """A token sees at most so many positions, the last of them its own; None: all."""
        return None

    def within(self, context: int) -> CacheSpec:
        """Declaration for sequences of at most `context` tokens."""
        return self

    def sees(self, position: int, page_size: int) -> int:
        """Index of the first page that the token at `position` sees."""
        return 0

    def keeps(self, position: int, page_size: int) -> int:
        """Index of the first page that a sequence keeps which goes on at `position`: the first that the last
        page border before it sees. So the sequence can also be used as a prefix, from that border on."""
        return self.sees((position - 1) // page_size * page_size, page_size)

    def needs(self, pages: int, position: int | None, page_size: int) -> int:
        """Index of the first page that must be there of a prefix of so many whole pages, for a sequence that
        goes on at `position` (None: at the token that follows the prefix)."""
        if position is None:
            return self.sees(pages * page_size, page_size)
        return self.keeps(position, page_size)

    def takes(self, begin: int, rows: int) -> range:
        """A sequence grows by the page indexes from `begin` to `rows` - 1: those that need a page."""
        return range(begin, rows)

    def peak(self, tokens: int, page_size: int, ahead: int) -> int:
        """Most pages at a time of a sequence that grows to `tokens` tokens, of which steps that have not
        retired compute at most `ahead`."""
        return -(-tokens // page_size)


@dataclass(frozen=True, slots=True)
class Full(CacheSpec):
    """Keys and values, which all later tokens see."""


@dataclass(frozen=True, slots=True)
class Latent(CacheSpec):
    """One vector of `head_dim` values, of which the keys and values of all heads are made."""

    parts: ClassVar[int] = 1
    kind: ClassVar[str] = "latent"


@dataclass(frozen=True, slots=True)
class SlidingWindow(CacheSpec):
    """Keys and values, which the next tokens see."""

    size: int
    """A token sees this many positions, the last of them its own."""
    kind: ClassVar[str] = "attention"
    """In baton.v1.KvGroup."""
    rows_may_lack: ClassVar[bool] = True

    @property
    def window(self) -> int | None:
        return self.size

    def within(self, context: int) -> CacheSpec:
        return self if self.size < context else Full(heads=self.heads, head_dim=self.head_dim)

    def sees(self, position: int, page_size: int) -> int:
        return max(0, position - self.size + 1) // page_size

    def peak(self, tokens: int, page_size: int, ahead: int) -> int:
        return min(-(-tokens // page_size), -(-(self.size - 1 + ahead) // page_size) + 2)


@dataclass(frozen=True, slots=True)
class ChunkedWindow(SlidingWindow):
    """Keys and values of chunks: a token sees the positions from the last multiple of `size` on, the last of
    them its own."""

    kind: ClassVar[str] = "chunked"

    def sees(self, position: int, page_size: int) -> int:
        return position // self.size * self.size // page_size


@dataclass(frozen=True, slots=True)
class State(CacheSpec):
    """What a recurrent layer remembers of all tokens so far: float32 tensors whose size does not depend on
    them.

    The page at index i holds the state behind the last token, so far, of that page. While its sequence grows
    within the page, steps overwrite it: it is the live state. Once the page is full it is final: a snapshot
    at a page border. A step keeps the snapshot at the last border that it reaches, and none at those before:
    their indexes have no page.
    """

    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...] = ()
    """Axis of each tensor that ranks divide among them; empty: they cannot."""
    kind: ClassVar[str] = "state"
    rows_may_lack: ClassVar[bool] = True

    @property
    def numbers(self) -> int:
        """In the state of a layer."""
        return sum(map(math.prod, self.shapes))

    def room(self, page_size: int, itemsize: int) -> int:
        return -(-self.numbers * STATE_ITEMSIZE // (page_size * itemsize))

    def sees(self, position: int, page_size: int) -> int:
        return max(0, position - 1) // page_size

    def takes(self, begin: int, rows: int) -> range:
        return range(max(begin, rows - 2), rows)

    @staticmethod
    def stops(start: int, end: int, page_size: int) -> list[int]:
        """Positions before which a row that computes `start` to `end` - 1 writes its state: the border of the
        page within which it begins, the last border that it reaches, and its end."""
        borders = {(end - 1) // page_size * page_size, end}
        if start % page_size:
            borders.add((start // page_size + 1) * page_size)
        return sorted(border for border in borders if start < border <= end)

    @staticmethod
    def most_drafts(first: int, page_size: int) -> int:
        """Drafts that a row may have from position `first` on. Right ones go into the state with the row that
        follows: the last token of a page is none, as its state is then final."""
        return page_size - 1 - first % page_size

    def peak(self, tokens: int, page_size: int, ahead: int) -> int:
        """Two that are kept, and two for each of two steps in flight."""
        return min(-(-tokens // page_size), 6)


STATE_ITEMSIZE = 4
"""Bytes of a number in a state."""


def attention_cache(
    window: int | None, heads: int = 1, head_dim: int = 1, *, chunk: int | None = None
) -> CacheSpec:
    """Declaration of a layer with so many KV heads. `window` and `chunk`: None: it sees all."""
    if chunk is not None:
        return ChunkedWindow(chunk, heads=heads, head_dim=head_dim)
    if window is None:
        return Full(heads=heads, head_dim=head_dim)
    return SlidingWindow(window, heads=heads, head_dim=head_dim)
