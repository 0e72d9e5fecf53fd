"""The whole embedding and head of a model that several ranks share, for the one of them that drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from baton.layers.linear import Linear
from baton.layers.parameters import Parameters
from baton.models.config import ModelError
from baton.models.decoder import Decoder, prepare_linears
from baton.models.loader import fill_at_random, read_weights


@dataclass(frozen=True, slots=True)
class WholeVocabulary:
    target: Decoder
    embedding: torch.Tensor
    """[vocab, hidden]"""
    head: Linear | None
    """None: it was not asked for."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]"""
        return self.target.scaled(F.embedding(tokens, self.embedding))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]"""
        assert self.head is not None
        return self.target.finished(self.head(hidden).float())


def read_whole(target: Decoder, model: Path, load_format: str, *, head: bool) -> WholeVocabulary | None:
    """`model`: the target's checkpoint. None: the target has one rank, and thus all of it. Raises
    CheckpointError."""
    if target.communicator is None:
        return None
    if model.is_file():
        raise ModelError(
            "with --tp heads without an embedding do not draft for a GGUF file: leave out --draft"
        )
    config, own = target.config, target.parameters
    parameters = Parameters(target.dtype, target.device, plan=own.plan)
    parameters.ignore("")  # all else
    size, hidden = config.vocab_size, config.hidden_size
    embedding = parameters.tensor("model.embed_tokens.weight", size, hidden)
    product = None
    if head and config.tied:
        product = Linear(embedding)
        parameters.linears.append(product)
    elif head:
        product = parameters.linear({"lm_head": size}, hidden, quantize=own.plan.head)
    if load_format == "dummy":
        fill_at_random(parameters, lambda done, total: None)
    else:
        read_weights(model, parameters, lambda done, total: None)
    prepare_linears(parameters)
    return WholeVocabulary(target, embedding, product)
