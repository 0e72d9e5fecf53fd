"""A drafter that has been told: for tests and benchmarks of what drafts cost and what they may change."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from baton.engine.draft.base import Drafter
from baton.engine.request import Sequence as TokenSequence


def prompt_digest(prompt: Sequence[int]) -> str:
    """Digest of a prompt's token ids, by which a file of continuations names it."""
    return hashlib.sha256(np.array(prompt, "<i8").tobytes()).hexdigest()


class OracleDrafter(Drafter):
    """Knows how sequences go on from an earlier run, and spoils a share of it."""

    name = "oracle"

    def __init__(self, continuations: Iterable[tuple[str, Sequence[int]]], right: float = 1.0) -> None:
        """`continuations`: a prompt's digest, and an output that followed it; several may follow one prompt.
        `right`: the share of tokens that are handed in as they are."""
        self._known: dict[str, list[tuple[int, ...]]] = {}
        for digest, tokens in continuations:
            self._known.setdefault(digest, []).append(tuple(tokens))
        self._right = right

    @classmethod
    def read(cls, path: str | Path, right: float = 1.0) -> OracleDrafter:
        """A file of lines {"prompt": digest, "tokens": [ids]}. Raises ValueError with a readable line."""
        try:
            lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
            return cls(((line["prompt"], line["tokens"]) for line in lines), right)
        except OSError as error:
            raise ValueError(f"continuations {path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no continuations: {error!r}") from error

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        prompt = sequence.request.prompt
        output = tuple(sequence.tokens[len(prompt) :])
        found = sequence.drafting
        if not isinstance(found, tuple) or found[: len(output)] != output:
            known = self._known.get(prompt_digest(prompt), ())
            found = next((tokens for tokens in known if tokens[: len(output)] == output), ())
            sequence.drafting = found
        count = len(output)
        return [self._spoiled(token, count + i) for i, token in enumerate(found[count : count + most])]

    def _spoiled(self, token: int, at: int) -> int:
        right = zlib.crc32(b"%d %d" % (token, at)) < self._right * 2**32
        return token if right else token - 1 if token else 1
