"""The file of API keys: one a line, read again when it changes.

    # comment
    KEY [name=NAME] [requests=N] [streams=N] [prompt_tokens=N]

KEY is 16 or more printable characters, or `sha256:` and the hexadecimal SHA-256 of a key, so that the file
need not hold it. The rest limits that key; 0 is no limit, what is not there is as the configuration says.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import time
from pathlib import Path

from baton.gateway.callers import Caller, Limits
from baton.rpc.errors import BatonError, failed_precondition
from baton.rpc.logs import get_logger
from baton.rpc.private_file import read_private

FLAG = "--api-keys"
MIN_KEY_CHARACTERS = 16
LOOK_SECONDS = 1.0
"""Least time between two looks at whether the file has changed."""
HASHED = "sha256:"

_log = get_logger()


class ApiKeys:
    """Used on one event loop only.

    Keys are found by a digest under a random key of this process, so that the time of a search tells nothing
    of the keys: whoever sends one cannot know what is compared.
    """

    def __init__(self, path: str, limits: Limits) -> None:
        """`limits`: of keys whose line does not say otherwise. Raises BatonError for what is wrong with the
        file."""
        self._path = path
        self._limits = limits
        self._blind = secrets.token_bytes(32)
        self._stamp = _stamp(path)
        self._looked = time.monotonic()
        self._callers = self._read()

    def find(self, key: str) -> Caller | None:
        """Whose key that is; None: nobody's."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            if _stamp(self._path) != self._stamp:
                self.reload()
        return self._callers.get(self._digest(hashlib.sha256(key.encode("utf-8", "replace")).digest()))

    def reload(self) -> None:
        """Reads the file again. One that is wrong is reported and changes nothing."""
        self._stamp = _stamp(self._path)
        try:
            found = self._read()
        except BatonError as error:
            _log.error("API keys not read again; the old ones stay", error=error.message)
            return
        for digest, caller in self._callers.items():
            if digest in found:
                caller.name, caller.limits = found[digest].name, found[digest].limits
                found[digest] = caller  # with what runs for it
            else:
                caller.revoked = True
        self._callers = found
        _log.info("API keys read again", keys=len(found))

    def _read(self) -> dict[bytes, Caller]:
        found: dict[bytes, Caller] = {}
        text = read_private(self._path, FLAG).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                digest = self._digest(_hash(words[0]))
                if digest in found:
                    raise ValueError("the key of an earlier line once more")
                found[digest] = _caller(words[1:], f"line {number}", self._limits)
            except ValueError as error:
                text = f"{FLAG}: {self._path}, line {number}: {error}"
                raise failed_precondition(text, "UNUSABLE_FILE") from None
        if not found:
            raise failed_precondition(f"{FLAG}: {self._path} holds no key", "UNUSABLE_FILE")
        return found

    def _digest(self, hashed: bytes) -> bytes:
        return hmac.digest(self._blind, hashed, "sha256")


def _hash(word: str) -> bytes:
    """SHA-256 of the key that the word is or describes. Raises ValueError, without naming the key."""
    if word.startswith(HASHED):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", word[len(HASHED) :]):
            raise ValueError(f"{HASHED} must be followed by 64 hexadecimal digits")
        return bytes.fromhex(word[len(HASHED) :])
    if len(word) < MIN_KEY_CHARACTERS or not (word.isascii() and word.isprintable()):
        raise ValueError(f"a key must have {MIN_KEY_CHARACTERS} or more printable ASCII characters")
    return hashlib.sha256(word.encode()).digest()


def _caller(words: list[str], name: str, limits: Limits) -> Caller:
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
    return Caller(name, limits)


def _stamp(path: str) -> tuple[int, int, int]:
    """Another one when the file has been changed or replaced."""
    try:
        about = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (about.st_mtime_ns, about.st_size, about.st_ino)
