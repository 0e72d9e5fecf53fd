"""Samples the tokens of launched steps, at once or, where a mask depends on a token that has not been read,
when the step before is read; and reads what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np
import torch

from baton.engine.cuda_sampler import CudaSampler
from baton.engine.grammar_masks import Masks
from baton.engine.launched_step import LaunchedStep, PendingSampling
from baton.engine.plan import Logprobs, Pooling, RowResult
from baton.engine.sampler import BAD_LOGITS, KernelSamples, Sampler, row_results
from baton.engine.step_graphs import DecodeGraphs
from baton.layers.async_copy import to_device
from baton.layers.tensor_parallel import Communicator


class StepSampling:
    """Of one runner."""

    def __init__(
        self,
        sampler: Sampler | CudaSampler | None,
        last_token: torch.Tensor,
        communicator: Communicator | None,
    ) -> None:
        """`sampler`: None on ranks but the first; `last_token`: int32 [slots + 1], of every batch slot."""
        self._sampler, self._last_token, self._communicator = sampler, last_token, communicator
        self.graphs: DecodeGraphs | None = None
        self._late: LaunchedStep | None = None
        """The last launched step, if its sampling is not enqueued yet."""

    def sample(self, launched: LaunchedStep, pending: PendingSampling) -> None:
        """Enqueues the sampling, or leaves it to `read` of the step before."""
        sampler = self._sampler
        masked = pending.masked
        if sampler is not None and masked and not sampler.grammars.ready(pending.slots.tolist(), masked):
            launched.late = pending
        else:
            self._sample(launched, pending)

    def launched(self, launched: LaunchedStep) -> None:
        """All of the step is enqueued but, perhaps, its sampling."""
        if launched.late is not None:
            self._late = launched
        elif launched.done is not None:
            launched.done.record()

    def read(self, launched: LaunchedStep) -> tuple[RowResult, ...]:
        """Waits for the step. Raises what its sampling did."""
        # Whatever fails here, the sampling that waited for these tokens must not run later: its slots and its
        # logits may then be another step's.
        late, self._late = self._late, None
        if launched.late is not None:
            raise RuntimeError("the step before it failed")
        if launched.failed is not None:
            raise launched.failed
        if launched.done is not None:
            launched.done.synchronize()
        samples = launched.samples
        tokens, finite = samples.read() if samples is not None else ([], [])
        if self._communicator is not None:
            self._communicator.check()
        if launched.masks is not None:
            launched.masks.sampled(tokens[row] for row in launched.masks.rows)
        if late is not None:
            self._sample_late(late)
        logprobs: dict[int, Logprobs] = {}
        if samples is not None and samples.logprobs is not None:
            logprobs = dict(zip(samples.logprob_rows, samples.logprobs.read(samples.wanted), strict=True))
        errors = samples.errors if samples is not None else {}
        rows = row_results(launched.rows, tokens, finite, logprobs, launched.prompts, errors)
        if launched.places is not None:
            rows = itemgetter(*launched.places)(rows)
        _add_pooled(rows, launched.pooled)
        return rows

    def _sample_late(self, launched: LaunchedStep) -> None:
        """Enqueues the sampling that waited for the tokens now read."""
        pending, launched.late = launched.late, None
        assert pending is not None
        try:
            self._sample(launched, pending)
            if launched.done is not None:
                launched.done.record()
        except Exception as error:
            launched.failed = error

    def _sample(self, launched: LaunchedStep, pending: PendingSampling) -> None:
        sampler = self._sampler
        if isinstance(sampler, Sampler):
            where = pending.slots, pending.positions, pending.masks
            launched.samples = samples = sampler.sample(pending.logits, *where)
            there = to_device(pending.slots, samples.tokens.device)
            self._last_token.index_copy_(0, there, samples.tokens.int())
        elif sampler is not None:
            masks = None
            if pending.masked:
                masks = sampler.masks(pending.slots.tolist(), pending.masked)
            launched.samples = self._choose(sampler, pending, masks).to_host()
            if masks is not None:
                masks.launched()
                launched.masks, launched.samples.errors = masks, masks.errors
        if self._communicator is not None:
            # All ranks have rank 0's last tokens. They differ only in what it has just sampled.
            self._communicator.broadcast(self._last_token)

    def _choose(self, sampler: CudaSampler, pending: PendingSampling, masks: Masks | None) -> KernelSamples:
        """By kernels, into the slots' last tokens too."""
        if pending.graph:
            assert self.graphs is not None
            return KernelSamples(self.graphs.choose(pending.graph, masks.host if masks is not None else None))
        if pending.simple is not None:
            return sampler.sample_simple(pending.logits, *pending.simple, self._last_token, masks)
        return sampler.sample(pending.logits, pending.slots, pending.positions, self._last_token, masks)


def pool_states(pooling: Pooling, states: torch.Tensor) -> torch.Tensor:
    """states: final hidden states of a row [tokens, hidden], which the result does not keep in memory."""
    return states[-1].to(torch.float32, copy=True) if pooling is Pooling.LAST else states.float().sum(0)


def _add_pooled(rows: Sequence[RowResult], pooled: Mapping[int, torch.Tensor]) -> None:
    """Adds what was pooled, float32 [hidden] by the rows' places, to their results."""
    for i, state in pooled.items():
        vector = rows[i].pooled = state.numpy()
        if not np.isfinite(vector).all():
            rows[i].error = BAD_LOGITS
