"""Sampling state of the batch slots."""

from __future__ import annotations

import numpy as np
import torch

from baton.engine.plan import SlotInit
from baton.layers.async_copy import to_device


class SlotStates:
    """Parameters of every slot on the host, as columns; occurrence counts on the device, for penalties, of
    max_slots * vocab_size * 5 bytes."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self.temperature = np.zeros(max_slots, np.float32)
        self.top_k = np.zeros(max_slots, np.int64)
        self.top_p = np.ones(max_slots, np.float32)
        self.min_p = np.zeros(max_slots, np.float32)
        self.repetition = np.ones(max_slots, np.float32)
        self.presence = np.zeros(max_slots, np.float32)
        self.frequency = np.zeros(max_slots, np.float32)
        self.seed = np.zeros(max_slots, np.uint64)
        self.output_length = np.zeros(max_slots, np.int64)
        """Sampled tokens, including those of launched steps."""
        self.min_tokens = np.zeros(max_slots, np.int64)
        self.penalized = np.zeros(max_slots, np.bool_)
        self.biased = np.zeros(max_slots, np.bool_)
        self.logprobs = np.full(max_slots, -1, np.int64)
        """-1: not requested."""
        self.plain = np.ones(max_slots, np.bool_)
        """Greedy, and nothing else asked for (but min_tokens, perhaps)."""
        self.simple = np.ones(max_slots, np.bool_)
        """A temperature, and nothing else asked for (but min_tokens or a grammar, perhaps)."""
        self.stop_tokens: list[list[int]] = [[]] * max_slots
        self.bias: list[tuple[list[int], list[float]]] = [([], [])] * max_slots
        # By way of numpy: on a CPU these pages take no memory before they are written.
        shape = (max_slots, vocab_size)
        self.counts = torch.from_numpy(np.zeros(shape, np.float32)).to(device)
        """float32 [max_slots, vocab]: how often each token was output."""
        self.prompt = torch.from_numpy(np.zeros(shape, np.bool_)).to(device)
        """bool [max_slots, vocab]: whether it is in the prompt."""

    def init(self, init: SlotInit) -> None:
        slot, params = init.slot, init.params
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.seed[slot] = init.seed
        self.output_length[slot] = len(init.output)
        self.stop_tokens[slot] = sorted(t for t in params.stop_token_ids if 0 <= t < self.vocab_size)
        self.min_tokens[slot] = params.min_tokens if self.stop_tokens[slot] else 0
        self.penalized[slot] = params.penalized
        self.biased[slot] = bool(params.logit_bias)
        self.bias[slot] = (list(params.logit_bias.keys()), list(params.logit_bias.values()))
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        unmodified = not params.penalized and not params.logit_bias and params.logprobs is None
        self.plain[slot] = params.greedy and unmodified and init.grammar is None
        unrestricted = params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0
        self.simple[slot] = unmodified and (params.greedy or unrestricted)
        if params.penalized:
            self._count(init)

    def _count(self, init: SlotInit) -> None:
        counts, prompt = self.counts[init.slot].zero_(), self.prompt[init.slot].zero_()
        if init.output:
            tokens = to_device(np.array(init.output), self._device)
            counts.index_add_(0, tokens, torch.ones(len(init.output), device=self._device))
        if init.prompt:
            prompt.index_fill_(0, to_device(np.array(init.prompt), self._device), True)

    def advance(self, slots: np.ndarray[tuple[int], np.dtype[np.int64]], tokens: torch.Tensor) -> None:
        """One more token [slots] was sampled for each slot; no slot occurs twice."""
        self.output_length[slots] += 1
        penalized_rows = self.penalized[slots].nonzero()[0]
        if penalized_rows.size:
            rows = to_device(slots[penalized_rows], self._device)
            tokens = tokens[to_device(penalized_rows, self._device)]
            self.counts.index_put_((rows, tokens), torch.ones((), device=self._device), accumulate=True)
