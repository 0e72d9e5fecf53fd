"""Which pictures are kept: within a bound for all, and in fair shares of the API keys."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.pictures.decoder import Picture
from baton.rpc.errors import exhausted, invalid_field

SHARE = 4
"""An API key's running requests may hold so many times what all leave free: one key alone 4/5 of all, two 4/9
each. So there is always room for another (dynamic thresholds: Choudhury and Hahne, 1998)."""


@dataclass(frozen=True, slots=True)
class PictureName:
    """An image as who sent it knows it. Nobody is given another's image, whatever digest they send."""

    owner: bytes
    """`ApiKey.owner`."""
    namespace: str
    file: bytes
    """SHA-256 of the file."""


@dataclass(slots=True)
class KeptPicture:
    picture: Picture
    names: set[PictureName] = field(default_factory=set)
    holds: Counter[bytes] = field(default_factory=Counter)
    """How often requests hold it, by owner. Empty: it is idle, and may have to make room."""
    last: bytes = b""
    """The owner who held it last, in whose share it is while it is idle."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.picture.pixels.nbytes


class PictureMemory:
    """Without I/O. Owners are those of API keys; empty: everybody, where there are no keys."""

    def __init__(self, max_bytes: int, dropped: Callable[[KeptPicture], None]) -> None:
        """max_bytes: of resized pixels. dropped: called for what has made room."""
        self.max_bytes = max_bytes
        self._dropped = dropped
        self._kept: dict[bytes, KeptPicture] = {}
        """By digest."""
        self._bytes = 0
        self._held = 0
        """Bytes of pictures that are not idle."""
        self._held_by: Counter[bytes] = Counter()
        """Bytes of pictures that are not idle, by owner; a picture that several hold counts for each."""
        self._idle: dict[bytes, OrderedDict[bytes, int]] = {}
        """By owner: digests, the least recently used first, and bytes."""
        self._idle_by: Counter[bytes] = Counter()

    def find(self, digest: bytes) -> KeptPicture | None:
        return self._kept.get(digest)

    def all(self) -> list[KeptPicture]:
        return list(self._kept.values())

    def hold(self, picture: Picture, owner: bytes, field_path: str) -> KeptPicture:
        """Until `release`, once for each call. field_path: of the image, for errors. Raises BatonError where
        there is no room, or the owner's share is used up."""
        kept = self._kept.get(picture.digest) or KeptPicture(picture)
        if owner not in kept.holds:
            self._check(kept, owner, field_path)
            if not kept.holds:
                self._wake(kept)
                self._held += kept.size
            self._held_by[owner] += kept.size
        kept.holds[owner] += 1
        return kept

    def release(self, digest: bytes, owner: bytes) -> None:
        kept = self._kept[digest]
        kept.holds[owner] -= 1
        if kept.holds[owner]:
            return
        del kept.holds[owner]
        self._held_by[owner] -= kept.size
        if not self._held_by[owner]:
            del self._held_by[owner]
        if not kept.holds:
            self._held -= kept.size
            kept.last = owner
            self._idle.setdefault(owner, OrderedDict())[digest] = kept.size
            self._idle_by[owner] += kept.size

    def make_room(self, size: int) -> None:
        """Idle pictures go until there is room for `size` bytes: the oldest of the owner who has most."""
        while self._bytes + size > self.max_bytes and self._idle:
            owner = max(self._idle, key=self._idle_by.__getitem__)
            kept = self._kept.pop(next(iter(self._idle[owner])))
            self._leave_idle(kept)
            self._bytes -= kept.size
            self._dropped(kept)

    def _check(self, kept: KeptPicture, owner: bytes, field_path: str) -> None:
        size, mib = kept.size, self.max_bytes >> 20
        if size > self.max_bytes:
            text = f"has {size} bytes of pixels; --image-memory-mib allows {mib} MiB"
            raise invalid_field(field_path, text, "IMAGE")
        free = self.max_bytes - self._held - (0 if kept.holds else size)
        used = self._held_by[owner]
        later = "(--image-memory-mib): send it again later"
        if free < 0:
            text = f"{field_path}: images of running requests fill the {mib} MiB that they may take {later}"
            raise exhausted(text, "PICTURES_FULL", 1000)
        if owner and used and used + size > SHARE * free:
            text = (
                f"{field_path}: images of this API key's running requests fill its share of {mib} MiB {later}"
            )
            raise exhausted(text, "PICTURES_FULL", 1000)

    def _wake(self, kept: KeptPicture) -> None:
        """From now on it is held."""
        digest = kept.picture.digest
        if digest in self._kept:
            self._leave_idle(kept)
        else:
            self.make_room(kept.size)
            self._kept[digest] = kept
            self._bytes += kept.size

    def _leave_idle(self, kept: KeptPicture) -> None:
        idle = self._idle[kept.last]
        self._idle_by[kept.last] -= idle.pop(kept.picture.digest)
        if not idle:
            del self._idle[kept.last], self._idle_by[kept.last]
