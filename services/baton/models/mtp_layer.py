"""What a layer of multi-token prediction is made of, for the families that have one."""

from __future__ import annotations

from dataclasses import dataclass

from baton.layers.linear import Linear
from baton.layers.norm import RmsNorm
from baton.models.decoder import DecoderLayer


@dataclass(frozen=True, slots=True)
class MtpLayer:
    token_norm: RmsNorm
    """Norm of the next tokens' embeddings."""
    hidden_norm: RmsNorm
    """Norm of the hidden states before them."""
    input: Linear
    """[tokens, embedding and hidden state] -> [tokens, hidden]"""
    layer: DecoderLayer
    """Layer 0 of a pool of its own."""
    norm: RmsNorm
    """Before the model's head."""
