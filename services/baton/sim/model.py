"""A pool of real bytes, and a "model" whose next token is a hash of the bytes that it attends to.

The KV entry of a token in a group is 8 bytes: its id, and a checksum of the id and of what the token sees
before it, found in the pages of all groups. So an entry stands for everything before it, and one page that is
stale, foreign, torn, of another group or not written changes what is sampled. A page of a state group begins
with one such entry, that of the last token so far.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from baton.engine.plan import Logprobs
from baton.kvcache.page_keys import DIGEST_BYTES, is_placeholder
from baton.sim.grammar import SimMatcher

VOCAB = 997
ENTRY_BYTES = 8
_ENTRY = struct.Struct("<II")
_ID = struct.Struct("<I")
_SEED = struct.Struct("<Q")
_UNWRITTEN = 0xEE


Windows = tuple[int | None, ...]
"""Windows of the model's KV groups; STATE: a group of states."""
STATE = 0
ONE: Windows = (None,)


def entries(token: int, before: Sequence[bytes | bytearray], windows: Windows) -> list[bytes]:
    """The KV entries of a token, one a group. `before`: of each group what the token sees before its own
    position; of a group without a window, and of one of states, its last entry is enough."""
    checksum = 0
    for group, (seen, window) in enumerate(zip(before, windows, strict=True)):
        if window:
            checksum = zlib.crc32(seen, checksum)
        elif seen:
            last = _ENTRY.unpack(seen[-ENTRY_BYTES:])[1]
            checksum = zlib.crc32(_ID.pack(last), checksum) if group else last
    checksum = zlib.crc32(_ID.pack(token), checksum)
    return [_ENTRY.pack(token, (checksum + group) % 2**32) for group in range(len(windows))]


def embedding(digest: bytes, index: int) -> int:
    """What stands for the token at `index` of an image; no token id."""
    return VOCAB + zlib.crc32(digest + _ID.pack(index)) % (2**32 - VOCAB)


def seen_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """A prompt as the model sees it: with embeddings in the place of placeholders."""
    return tuple(_embedded(token) if is_placeholder(token) else token for token in tokens)


def _embedded(token: int) -> int:
    digest = (token >> 32).to_bytes(DIGEST_BYTES + 1, "big")[1:]
    return embedding(digest, token & (2**31 - 1))


def sample(seen: bytes | bytearray, seed: int, penalized: Sequence[int] = ()) -> int:
    """`penalized`: the tokens that penalties are for, which the device keeps; empty without penalties."""
    state = zlib.crc32(array("I", penalized).tobytes(), zlib.crc32(seen))
    return zlib.crc32(_SEED.pack(seed % 2**64), state) % VOCAB


class History:
    """A sequence's KV, computed without pages."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._entries = [bytearray() for _ in windows]

    def append(self, token: int) -> None:
        before = [self._last(group, window - 1 if window else 1) for group, window in self._groups]
        for group, written in enumerate(entries(token, before, self._windows)):
            self._entries[group] += written

    @property
    def seen(self) -> bytes:
        """What the last token sees, in all groups."""
        return b"".join(self._last(group, 1 if window == STATE else window) for group, window in self._groups)

    @property
    def logprob(self) -> float:
        """A number that depends on all that the last token sees."""
        return logprob([self.seen])

    @property
    def _groups(self) -> Iterable[tuple[int, int | None]]:
        return enumerate(self._windows)

    def _last(self, group: int, count: int | None) -> bytearray:
        found = self._entries[group]
        return found if count is None else found[max(0, len(found) - count * ENTRY_BYTES) :]


def reference(
    prompt: Sequence[int],
    seed: int,
    count: int,
    stop: frozenset[int] = frozenset(),
    penalized: bool = False,
    windows: Windows = ONE,
    constrained: bool = False,
) -> tuple[int, ...]:
    """The output tokens, computed without pages. `prompt`: as `seen_tokens`."""
    history, matcher = History(windows), SimMatcher() if constrained else None
    text = [token for token in prompt if token < VOCAB]
    output: list[int] = []
    for token in prompt:
        history.append(token)
    for _ in range(count):
        token = sample(history.seen, seed, (*text, *output) if penalized else ())
        token = matcher.choose(token) if matcher is not None else token
        output.append(token)
        if token in stop:
            break
        history.append(token)
    return tuple(output)


def prompt_logprobs(prompt: Sequence[int], windows: Windows = ONE) -> tuple[Logprobs, ...]:
    """Log-probabilities of a prompt's own tokens but the first, computed without pages."""
    history, found = History(windows), []
    for token, following in pairwise(prompt):
        history.append(token)
        found.append(Logprobs(following, history.logprob))
    return tuple(found)


def logprob(seen: Sequence[bytes]) -> float:
    """A number that a message holds exactly, in 32 bits."""
    return -float(zlib.crc32(b"".join(seen)) >> 8)


class SimPool:
    """Page bytes, the pages' generations and the last retired step, as receivers see them. Outlives its
    process, like shared memory."""

    def __init__(self, num_pages: int, page_size: int, heads: int = 1) -> None:
        """A page: [head, token, entry]."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.heads = heads
        self.head_bytes = page_size * ENTRY_BYTES
        self.page_bytes = heads * self.head_bytes
        self.data = bytearray([_UNWRITTEN]) * (num_pages * self.page_bytes)
        self.generations = array("Q", bytes(8 * num_pages))
        self.retired = 0

    def retire(self, step: int) -> None:
        self.retired = step

    def write(self, page: int, offset: int, data: bytes | bytearray) -> None:
        start = page * self.page_bytes + offset
        self.data[start : start + len(data)] = data

    def read(self, page: int, offset: int, size: int) -> bytes:
        start = page * self.page_bytes + offset
        return bytes(self.data[start : start + size])


POISON = 2**63 + 1
"""The seed of a request whose steps end their process."""
SILENT_POISON = 2**63 + 2
"""The seed of a request whose steps end their process before it can say a word."""
POISONS = (POISON, SILENT_POISON)
