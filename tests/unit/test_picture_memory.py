"""What the gateway keeps of pictures: sums that are right, after whatever order of calls."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from baton.gateway.picture_memory import SHARE, PictureMemory
from baton.pictures.decoder import Picture
from baton.rpc.errors import BatonError

ROOM = 1000
OWNERS = (b"", b"a", b"b", b"c")


def picture(number: int) -> Picture:
    """Of 3 to 300 bytes."""
    return Picture(number.to_bytes(32, "big"), np.zeros((1 + 7 * number % 100, 1, 3), np.uint8))


def check(memory: PictureMemory, held: Counter[tuple[bytes, int]]) -> None:
    kept = {int.from_bytes(each.picture.digest, "big"): each for each in memory.all()}
    assert {number for _, number in held} <= kept.keys()
    sizes = {number: each.size for number, each in kept.items()}
    assert memory._bytes == sum(sizes.values()) <= ROOM
    assert memory._held == sum(sizes[number] for number in {number for _, number in held})
    for owner in OWNERS:
        assert memory._held_by[owner] == sum(sizes[number] for who, number in held if who == owner)
        idle = memory._idle.get(owner, {})
        assert memory._idle_by[owner] == sum(idle.values())
    idle_now = {int.from_bytes(digest, "big") for each in memory._idle.values() for digest in each}
    assert idle_now == kept.keys() - {number for _, number in held}


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_right_and_shares_are_kept(seed: int):
    rng, dropped = random.Random(seed), []
    memory, held, refused = PictureMemory(ROOM, dropped.append), Counter(), 0
    for _ in range(400):
        if held and rng.random() < 0.4:
            owner, number = rng.choice([*held.elements()])
            memory.release(number.to_bytes(32, "big"), owner)
            held[owner, number] -= 1
            held += Counter()
        else:
            owner, number = rng.choice(OWNERS), rng.randrange(30)
            made = picture(number)
            own, others = memory._held_by[owner], memory._held
            try:
                memory.hold(made, owner, "image")
                held[owner, number] += 1
                free = ROOM - memory._held
                assert not owner or not own or memory._held_by[owner] in (own, *range(SHARE * free + 1))
            except BatonError as error:
                refused += 1
                assert error.reason == "PICTURES_FULL" and (owner, number) not in held
                assert others + made.pixels.nbytes > ROOM or (owner and own)
        check(memory, held)
    assert refused and dropped


def test_what_makes_room_is_the_oldest_of_who_has_most():
    memory = PictureMemory(10, lambda kept: gone.append((kept.last, kept.picture.digest[0])))
    gone: list[tuple[bytes, int]] = []

    def leave(owner: bytes, number: int) -> None:
        made = Picture(bytes([number]) * 32, np.zeros((2, 1, 1), np.uint8))
        memory.hold(made, owner, "image")
        memory.release(made.digest, owner)

    for owner, number in ((b"b", 9), (b"a", 1), (b"a", 2), (b"a", 3), (b"a", 1), (b"b", 8)):
        leave(owner, number)
    assert not gone
    leave(b"c", 5)
    leave(b"b", 7)
    assert gone == [(b"a", 2), (b"b", 9)]  # of two who have as much, who came first
