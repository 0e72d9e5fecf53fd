"""Medusa heads guess the next tokens from the model's last final hidden state, and keep nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.draft.base import Drafter
from baton.engine.draft.sampling import DraftSampler, read_drafts
from baton.engine.request import Sequence as TokenSequence
from baton.layers.batch import FINAL
from baton.models.medusa import MedusaHeads


class MedusaDrafter(Drafter):
    name = "medusa"
    computes = True
    tap = (FINAL,)

    def __init__(self, heads: MedusaHeads, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._heads = heads
        self._most_rows = max_slots
        self._sampler = DraftSampler(max_slots, vocab_size, device)
        self._guesses: dict[TokenSequence, list[int]] = {}

    def observe(self, sequence: TokenSequence, start: int, hidden: torch.Tensor) -> None:
        # The token behind these is known: they predict the one after it.
        sequence.drafting = start + len(hidden) + 1, hidden[-1].clone()

    @torch.inference_mode()
    def prepare(self, limits: Sequence[tuple[TokenSequence, int]]) -> None:
        self._guesses.clear()
        states, rows = list[torch.Tensor](), list[tuple[TokenSequence, int]]()
        for sequence, most in limits[: self._most_rows]:
            known = sequence.drafting
            if isinstance(known, tuple) and known[0] == len(sequence.tokens):
                self._sampler.init(len(rows), sequence)
                rows.append((sequence, most))
                states.append(known[1])
        found = []
        for depth in range(min(len(self._heads.heads), max((most for _, most in rows), default=0))):
            going = np.array([i for i, (_, most) in enumerate(rows) if most > depth], np.int64)
            logits = self._heads.logits(depth, torch.stack([states[i] for i in going]))
            positions = np.array([len(rows[i][0].tokens) + depth for i in going], np.int64)
            found.append((going, self._sampler.sample(logits, going, positions)))
        drawn = read_drafts([samples for _, samples in found])
        for depth, ((going, _), (tokens, finite)) in enumerate(zip(found, drawn, strict=True)):
            for i, token, is_number in zip(going, tokens, finite, strict=True):
                guess = self._guesses.setdefault(rows[i][0], [])
                if is_number and len(guess) == depth:
                    guess.append(token)

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        return self._guesses.get(sequence, ())[:most]
