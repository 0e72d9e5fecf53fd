"""Hidden states that a prefill node sends with first tokens, for the drafters of decode nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from baton.layers.async_copy import beside_steps
from baton.layers.batch import FINAL
from baton.rpc.errors import invalid
from baton.v1 import node_pb2

MOST_LAYERS = 16
MOST_BYTES = 2**16
"""Bytes of a prompt's states, if a token takes no more."""
_FINAL = 2**32 - 1
"""HiddenTap's FINAL in messages."""


def layers_to(tap: Sequence[int]) -> list[int]:
    return [_FINAL if layer == FINAL else layer for layer in tap]


def layers_from(layers: Sequence[int]) -> tuple[int, ...]:
    """HiddenTap.layers. Raises BatonError."""
    if len(layers) > MOST_LAYERS or any(a >= b for a, b in pairwise(layers)):
        raise invalid("hello.hidden_layers", f"hidden_layers ascend and are at most {MOST_LAYERS}")
    return tuple(FINAL if layer == _FINAL else layer for layer in layers)


def last_rows(hidden: torch.Tensor) -> torch.Tensor:
    """[tokens, values] -> on the host, the last tokens, as many as there is room for in a message."""
    rows = max(1, MOST_BYTES // (hidden.shape[1] * hidden.itemsize))
    with beside_steps(hidden.device):
        return hidden[-rows:].to("cpu", copy=True)


def hidden_to(hidden: torch.Tensor) -> bytes:
    """What `last_rows` gave -> PrefillResponse's FirstTokens.hidden."""
    return hidden.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True, slots=True)
class HiddenForm:
    """What a node wants of others."""

    layers: tuple[int, ...]
    """HiddenTap.layers"""
    values: int
    """Values of a token in all layers."""
    dtype: torch.dtype

    @classmethod
    def of(cls, tap: tuple[int, ...], model: node_pb2.ModelInfo) -> HiddenForm:
        return cls(tap, len(tap) * model.embedding_size, getattr(torch, model.dtype))

    def read(self, data: bytes) -> torch.Tensor:
        """-> [tokens, values]. Raises BatonError for what has another form."""
        row = self.values * self.dtype.itemsize
        if not row or len(data) % row:
            raise invalid("first.hidden", f"{len(data)} bytes of hidden states, of {row} bytes a token")
        return torch.frombuffer(bytearray(data), dtype=self.dtype).view(-1, self.values)
