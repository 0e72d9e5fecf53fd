"""What strangers show: nothing, or what nearly opens a door. By name, so that a case can be sent again to a
deployment with other secrets."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from baton.authentication.cluster import HEADER
from fuzzing.talk import Headers

AUTHORIZATION = "authorization"


@dataclass(frozen=True)
class Keys:
    """What opens the doors of a deployment: all of them, between these two."""

    secret: str
    api_key: str

    @property
    def parts(self) -> list[str]:
        """Of which none may be seen by others."""
        return [text[at : at + 12] for text in (self.secret, self.api_key) for at in (2, len(text) - 14)]

    def of(self, operator: bool, http: bool = False) -> Right:
        """operator: the door is not for clients."""
        own, other = (self.secret, self.api_key) if operator else (self.api_key, self.secret)
        if operator and not http:
            return Right(HEADER, "", own, AUTHORIZATION, "Bearer ", other)
        return Right(AUTHORIZATION, "Bearer ", own, HEADER, "", other)


@dataclass(frozen=True)
class Right:
    """What opens one door: `scheme + value` in the header `name`. other_*: what opens the other one."""

    name: str
    scheme: str
    value: str
    other_name: str
    other_scheme: str
    other: str

    @property
    def full(self) -> str:
        return self.scheme + self.value

    @property
    def wrong(self) -> str:
        return self.scheme + _flip(self.value, 0)


def broken(way: str, right: Right) -> Headers:
    """What does not open the door, in the way of that name (one of WAYS)."""
    if way in _VALUES:
        return ((right.name, _VALUES[way](right)),)
    return _HEADERS[way](right)


def _flip(value: str, at: int, bit: int = 1) -> str:
    data = bytearray(value.encode())
    data[at] ^= bit
    return data.decode("latin-1")


def _bare(right: Right) -> str:
    """Without the scheme; where there is none, with one."""
    return right.value if right.scheme else f"Bearer {right.value}"


_VALUES: dict[str, Callable[[Right], str | bytes]] = {
    "empty": lambda right: "",
    "scheme alone": lambda right: "Bearer",
    "empty value": lambda right: "Bearer ",
    "first character": lambda right: right.scheme + right.value[:1],
    "first half": lambda right: right.scheme + right.value[: len(right.value) // 2],
    "last half": lambda right: right.scheme + right.value[len(right.value) // 2 :],
    "all but last": lambda right: right.scheme + right.value[:-1],
    "all but first": lambda right: right.scheme + right.value[1:],
    "one more": lambda right: right.full + "0",
    "one more before": lambda right: right.scheme + "0" + right.value,
    "bit at begin": lambda right: right.wrong,
    "bit in the middle": lambda right: right.scheme + _flip(right.value, len(right.value) // 2),
    "bit at end": lambda right: right.scheme + _flip(right.value, -1),
    "top bit": lambda right: (right.scheme + _flip(right.value, 3, 0x80)).encode("latin-1"),
    "other case": lambda right: right.scheme + right.value.swapcase(),
    "backwards": lambda right: right.scheme + right.value[::-1],
    "twice in a row": lambda right: right.full + right.value,
    "repeated": lambda right: right.full + f" {right.value}",
    "quoted": lambda right: f'{right.scheme}"{right.value}"',
    "list": lambda right: f"{right.full},{right.wrong}",
    "list of the same": lambda right: f"{right.full}, {right.full}",
    "base64": lambda right: right.scheme + base64.b64encode(right.value.encode()).decode(),
    "sha256": lambda right: f"{right.scheme}sha256:{hashlib.sha256(right.value.encode()).hexdigest()}",
    "basic": lambda right: f"Basic {right.value}",
    "basic, as users": lambda right: "Basic " + base64.b64encode(f"x:{right.value}".encode()).decode(),
    "no space": lambda right: f"Bearer{right.value}",
    "scheme twice": lambda right: f"Bearer Bearer {right.value}",
    "scheme and colon": lambda right: f"Bearer: {right.value}",
    "tab": lambda right: f"Bearer\t{right.value}",
    "as the other door has it": _bare,
    "of the other door": lambda right: right.scheme + right.other,
    "star": lambda right: right.scheme + "*",
    "null": lambda right: right.scheme + "null",
    "pattern": lambda right: right.scheme + ".{0,99}",
    "spaces": lambda right: " " * 64,
    "long": lambda right: right.scheme + right.value * 40,
    "very long": lambda right: right.scheme + right.value * 2000,
    "not ASCII": lambda right: (right.full + "é").encode(),
    "not UTF-8": lambda right: right.full.encode() + b"\xff\xfe",
    "null byte": lambda right: right.full.encode() + b"\x00",
    "null byte and more": lambda right: right.full.encode() + b"\x00" + b"x" * 8,
    "noise": lambda right: bytes(range(128, 256)),
}
_HEADERS: dict[str, Callable[[Right], Headers]] = {
    "nothing": lambda right: (),
    "right, then wrong": lambda right: ((right.name, right.full), (right.name, right.wrong)),
    "wrong, then right": lambda right: ((right.name, right.wrong), (right.name, right.full)),
    "empty, then right": lambda right: ((right.name, ""), (right.name, right.full)),
    "right, then empty": lambda right: ((right.name, right.full), (right.name, "")),
    "right twice": lambda right: ((right.name, right.full),) * 2,
    "right between wrong": lambda right: tuple(
        (right.name, each) for each in (right.wrong, right.full, right.wrong)
    ),
    "in halves": lambda right: (
        (right.name, right.full[: len(right.full) // 2]),
        (right.name, right.full[len(right.full) // 2 :]),
    ),
    "what opens the other door": lambda right: ((right.other_name, right.other_scheme + right.other),),
    "in the other header": lambda right: ((right.other_name, right.other_scheme + right.value),),
    "exchanged": lambda right: (
        (right.name, right.scheme + right.other),
        (right.other_name, right.other_scheme + right.value),
    ),
    "binary": lambda right: ((f"{right.name}-bin", right.full.encode()),),
    "binary noise": lambda right: ((f"{right.name}-bin", bytes(range(256))),),
    "binary and wrong": lambda right: (
        (f"{right.name}-bin", right.full.encode()),
        (right.name, right.wrong),
    ),
    "near name": lambda right: ((f"{right.name}s", right.full), (f"x-{right.name}", right.full)),
    "underscores": lambda right: ((right.name.replace("-", "_") + "_", right.full),),
    "proxy's": lambda right: (("proxy-authorization", f"Bearer {right.value}"), ("x-auth", right.value)),
    "cookie": lambda right: (("cookie", f"{right.name}={right.value}"),),
    "forwarded": lambda right: (
        ("x-forwarded-for", "127.0.0.1"),
        ("x-real-ip", "127.0.0.1"),
        ("forwarded", "for=127.0.0.1"),
        ("x-original-url", "/health"),
        ("x-http-method-override", "GET"),
    ),
    "many": lambda right: tuple((f"x-{number}", right.full) for number in range(300)),
}
WAYS = (*_VALUES, *_HEADERS)
