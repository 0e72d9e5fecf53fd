"""API keys of the gateway's clients, and what runs for each.

Their file has one a line, and is read again when it changes:

    # comment
    KEY [name=NAME] [requests=N] [streams=N] [prompt_tokens=N]

KEY is 16 or more printable characters, or `sha256:` and the hexadecimal SHA-256 of a key, so that the file
need not hold it. The rest limits that key; 0 is no limit, and the configuration gives the defaults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from baton.authentication.private_files import read_private
from baton.rpc.errors import BatonError, exhausted, failed_precondition, invalid, unauthenticated
from baton.rpc.logs import get_logger


@dataclass(frozen=True, slots=True)
class Limits:
    """0: none."""

    requests: int = 0
    streams: int = 0
    prompt_tokens: int = 0


class ApiKey:
    """One API key and its use; or everybody, where there are no keys. Used on one event loop only."""

    def __init__(self, name: str, limits: Limits, owner: bytes = b"", identity: bytes = b"") -> None:
        """name: for logs; contains no part of the key. owner: differs from that of every other key, and stays
        the same while this process runs; empty: everybody. identity: the same at every gateway, and told to
        nobody."""
        self.name = name
        self.limits = limits
        self.owner = owner
        self.identity = identity
        self.revoked = False
        self._requests = 0
        self._streams = 0

    def begin_request(self) -> None:
        """Counts a request until `end_request`. Raises BatonError above the limit."""
        self._check_key()
        if not self.has_room:
            raise exhausted(
                f"this API key has {self._requests} requests running already", "KEY_REQUESTS", 1000
            )
        self._requests += 1

    @property
    def has_room(self) -> bool:
        """One more request may run."""
        return not self.limits.requests or self._requests < self.limits.requests

    def end_request(self) -> None:
        self._requests -= 1

    def open_stream(self) -> None:
        """Counts a stream until `close_stream`. Raises BatonError above the limit."""
        self._check_key()
        if self.limits.streams and self._streams >= self.limits.streams:
            raise exhausted(f"this API key has {self._streams} streams open already", "KEY_STREAMS", 1000)
        self._streams += 1

    def close_stream(self) -> None:
        self._streams -= 1

    def check_prompt(self, tokens: int, field: str) -> None:
        """Raises BatonError, naming the field, for a prompt that is longer than this key may send."""
        longest = self.limits.prompt_tokens
        if longest and tokens > longest:
            text = f"the prompt has {tokens} tokens; {longest} are allowed here"
            raise invalid(field, text, "PROMPT_TOO_LONG")

    def _check_key(self) -> None:
        """Raises BatonError if the key was removed: a stream may outlive its key."""
        if self.revoked:
            raise unauthenticated("this API key has been withdrawn", "KEY_WITHDRAWN")


FLAG = "--api-keys"
MIN_KEY_CHARACTERS = 16
CHECK_SECONDS = 1.0
"""Minimum time between two checks whether the file has changed."""
HASHED = "sha256:"

_log = get_logger()


class ApiKeys:
    """Used on one event loop only.

    Keys are looked up by a digest under a random key of this process, so that the time of a lookup reveals
    nothing about them.
    """

    def __init__(self, path: str, limits: Limits) -> None:
        """`limits`: defaults for keys whose line has no others. Raises BatonError if the file is wrong."""
        self._path = path
        self._limits = limits
        self._digest_key = secrets.token_bytes(32)
        self._file_version = _file_version(path)
        self._checked = time.monotonic()
        self._keys = self._read()

    def find(self, key: str) -> ApiKey | None:
        """None: the key is unknown."""
        now = time.monotonic()
        if now - self._checked >= CHECK_SECONDS:
            self._checked = now
            if _file_version(self._path) != self._file_version:
                self.reload()
        return self._keys.get(self._digest(hashlib.sha256(key.encode("utf-8", "replace")).digest()))

    def reload(self) -> None:
        """Reads the file again. One that is wrong is reported and changes nothing."""
        self._file_version = _file_version(self._path)
        try:
            found = self._read()
        except BatonError as error:
            _log.error("API keys not read again; the old ones stay", error=error.message)
            return
        for digest, api_key in self._keys.items():
            if digest in found:
                api_key.name, api_key.limits = found[digest].name, found[digest].limits
                found[digest] = api_key  # with what runs for it
            else:
                api_key.revoked = True
        self._keys = found
        _log.info("API keys read again", keys=len(found))

    def _read(self) -> dict[bytes, ApiKey]:
        found: dict[bytes, ApiKey] = {}
        text = read_private(self._path, FLAG).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                hashed = _hash(words[0])
                digest = self._digest(hashed)
                if digest in found:
                    raise ValueError("the key of an earlier line once more")
                identity = hashlib.sha256(hashed).digest()
                name, limits = _parse_key_options(words[1:], f"line {number}", self._limits)
                found[digest] = ApiKey(name, limits, digest, identity)
            except ValueError as error:
                text = f"{FLAG}: {self._path}, line {number}: {error}"
                raise failed_precondition(text, "UNUSABLE_FILE") from None
        if not found:
            raise failed_precondition(f"{FLAG}: {self._path} holds no key", "UNUSABLE_FILE")
        return found

    def _digest(self, hashed: bytes) -> bytes:
        return hmac.digest(self._digest_key, hashed, "sha256")


def _hash(word: str) -> bytes:
    """SHA-256 of the key that the word is or describes. Raises ValueError, without naming the key."""
    if word.startswith(HASHED):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", word[len(HASHED) :]):
            raise ValueError(f"{HASHED} must be followed by 64 hexadecimal digits")
        return bytes.fromhex(word[len(HASHED) :])
    if len(word) < MIN_KEY_CHARACTERS or not (word.isascii() and word.isprintable()):
        raise ValueError(f"a key must have {MIN_KEY_CHARACTERS} or more printable ASCII characters")
    return hashlib.sha256(word.encode()).digest()


def _parse_key_options(words: list[str], name: str, limits: Limits) -> tuple[str, Limits]:
    numbers = {field.name: 0 for field in dataclasses.fields(Limits)}
    for word in words:
        what, equals, value = word.partition("=")
        if what == "name" and value:
            name = value
        elif what in numbers and value.isdecimal():
            limits = dataclasses.replace(limits, **{what: int(value)})
        else:
            known = ", ".join(f"{each}=N" for each in numbers)
            raise ValueError(f"after the key come name=NAME, {known}" + (f", not {what}=" if equals else ""))
    return name, limits


def _file_version(path: str) -> tuple[int, int, int]:
    """Differs when the file has been changed or replaced."""
    try:
        about = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (about.st_mtime_ns, about.st_size, about.st_ino)
