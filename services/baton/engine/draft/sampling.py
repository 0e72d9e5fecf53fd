"""Draws drafts with the noise that the model's tokens are drawn with: where probabilities are alike, so are
the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.batch import Ints
from baton.engine.draft.kv_slots import slot_init
from baton.engine.request import Sequence as TokenSequence
from baton.engine.sampler import KernelSamples, Sampler, Samples
from baton.engine.sampler_ops import draw, row_keys
from baton.layers.async_copy import Upload


class DraftSampler:
    """On a CPU under all of a sequence's parameters; on a GPU by its temperature and seed alone, so that
    nothing waits for the device."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._whole = Sampler(max_slots, vocab_size, device) if device.type == "cpu" else None
        self.temperatures = np.zeros(max_slots, np.float32)
        self.seeds = np.zeros(max_slots, np.uint64)

    def init(self, slot: int, sequence: TokenSequence) -> None:
        if self._whole is not None:
            self._whole.init(slot_init(slot, sequence))
        self.temperatures[slot] = sequence.request.params.temperature
        self.seeds[slot] = sequence.seed

    def sample(self, logits: torch.Tensor, slots: Ints, positions: Ints) -> Samples | KernelSamples:
        """Logits [slots, vocab], which this may modify; positions [slots]: those of the drafts."""
        if self._whole is not None:
            return self._whole.sample(logits, slots, positions)
        upload = Upload()
        upload.add(self.temperatures[slots])
        upload.add(row_keys(self.seeds[slots], positions.astype(np.uint64)))
        temperatures, keys = upload.send(self._device)
        result = torch.empty(len(slots), 2, dtype=torch.int32, device=self._device)
        sample_by_temperature(logits, temperatures, keys, result)
        return KernelSamples(result)


def read_drafts(found: Sequence[Samples | KernelSamples]) -> list[tuple[list[int], list[bool]]]:
    """Tokens of each, and whether their logits were finite. Waits for the device, once."""
    for samples in found:
        if isinstance(samples, KernelSamples):
            samples.to_host()
    if any(isinstance(samples, KernelSamples) for samples in found) and torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return [samples.read() for samples in found]


def sample_by_temperature(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, result: torch.Tensor
) -> None:
    """Logits [rows, vocab], temperatures float32 [rows] (0: greedy), keys: int64 generator states [rows] ->
    int32 [rows, 2]: the token, and the bits of the largest logit. A CUDA graph can hold it."""
    if logits.device.type == "cuda":
        from baton.layers.kernels.sampling import sample

        slots = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        sample(logits, temperatures, keys, slots, torch.empty_like(slots), result)
        return
    logits = logits.float()
    peaks, tokens = logits.max(-1)
    scaled = (logits - peaks[:, None]) / temperatures.clamp(min=1e-30)[:, None]
    drawn = torch.where(temperatures > 0, draw(scaled, None, keys), tokens)
    result.copy_(torch.stack((drawn.int(), peaks.view(torch.int32)), 1))
