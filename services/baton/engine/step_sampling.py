"""Samples the tokens of launched steps, at once or, where a mask depends on a token that has not been read,
when the step before is read; and reads what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np
import torch

from baton.engine.batch import DraftRound
from baton.engine.cuda_sampler import CudaSampler
from baton.engine.grammar_masks import Masks
from baton.engine.launched_step import LaunchedStep, PendingSampling
from baton.engine.plan import Logprobs, Pooling, RowResult
from baton.engine.sampler import BAD_LOGITS, KeptToken, KernelSamples, Sampler, row_results
from baton.engine.step_graphs import DecodeGraphs
from baton.layers.async_copy import Upload, to_device
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
        kept = self._kept(launched, tokens) if launched.drafted else {}
        rows = row_results(launched.rows, tokens, finite, logprobs, launched.prompts, errors, kept)
        if launched.places is not None:
            rows = itemgetter(*launched.places)(rows)
        _add_pooled(rows, launched.pooled)
        return rows

    def _kept(self, launched: LaunchedStep, tokens: Sequence[int]) -> dict[int, list[KeptToken]]:
        """By the index among the samples, whose tokens are given: what follows each behind right drafts."""
        found: dict[int, list[KeptToken]] = {}
        last = list(tokens)
        for depth, (each, samples) in enumerate(launched.drafted):
            tokens, finite = samples.read()
            logprobs: dict[int, Logprobs] = {}
            if samples.logprobs is not None:
                logprobs = dict(zip(samples.logprob_rows, samples.logprobs.read(samples.wanted), strict=True))
            for i, (of, draft) in enumerate(zip(each.of.tolist(), each.drafts.tolist(), strict=True)):
                kept = found.setdefault(of, [])
                if len(kept) == depth and last[of] == draft:
                    last[of] = tokens[i]
                    kept.append(KeptToken(tokens[i], logprobs.get(i), finite[i], samples.errors.get(i, "")))
        if isinstance(self._sampler, CudaSampler):
            slots = [launched.slots[of] for of in found]
            self._sampler.advance(slots, [len(kept) for kept in found.values()])
        return found

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
            self._sample_on_host(sampler, launched, pending)
        elif sampler is not None:
            masks = None
            if pending.masked:
                masks = sampler.masks(pending.slots.tolist(), pending.masked)
            samples = self._choose(sampler, pending, masks)
            if pending.rounds:
                self._sample_rounds(sampler, launched, pending, samples)
            launched.samples = samples.to_host()
            if masks is not None:
                masks.launched()
                launched.masks, launched.samples.errors = masks, masks.errors
        if self._communicator is not None:
            # All ranks have rank 0's last tokens. They differ only in what it has just sampled.
            self._communicator.broadcast(self._last_token)

    def _sample_on_host(self, sampler: Sampler, launched: LaunchedStep, pending: PendingSampling) -> None:
        """Each round samples where the drafts before it were right."""
        slots, positions, count = pending.slots, pending.positions, len(pending.slots)
        launched.samples = sampler.sample(pending.logits[:count], slots, positions, pending.masks)
        last, device = launched.samples.tokens.int(), pending.logits.device
        launched.slots = slots.tolist() if pending.rounds else []
        first, right = count, np.full(count, True)
        for depth, each in enumerate(pending.rounds, 1):
            kept = (right[each.of] & (last.cpu().numpy()[each.of] == each.drafts)).nonzero()[0]
            right[:] = False
            if kept.size:
                of = each.of[kept]
                right[of] = True
                masks = sampler.begin_masks(slots[of].tolist())
                logits = pending.logits[to_device(first + kept, device)]
                samples = sampler.sample(logits, slots[of], positions[of] + depth, masks)
                last[to_device(of, device)] = samples.tokens.int()
                launched.drafted.append((DraftRound(of, each.drafts[kept]), samples))
            first += len(each.of)
        self._last_token.index_copy_(0, to_device(slots, device), last)

    def _sample_rounds(
        self, sampler: CudaSampler, launched: LaunchedStep, pending: PendingSampling, samples: KernelSamples
    ) -> None:
        """Samples behind each draft, and lets count, on the device, what follows right ones: a slot's last
        token and its penalties' counts."""
        device, count = pending.logits.device, len(pending.slots)
        upload = Upload()
        upload.add(pending.slots.astype(np.int32))
        for each in pending.rounds:
            upload.add(each.of)
            upload.add(each.drafts)
        slots, *arrays = upload.send(device)
        last, right = samples.tokens.clone(), torch.ones(count, dtype=torch.bool, device=device)
        first, launched.slots = count, pending.slots.tolist()
        for depth, each in enumerate(pending.rounds, 1):
            if set(each.of.tolist()) & set(pending.masked):
                raise RuntimeError("a row with a grammar has drafts: its masks are not known yet")
            of, drafts = arrays[2 * depth - 2], arrays[2 * depth - 1]
            kept = right.index_select(0, of) & (last.index_select(0, of) == drafts)
            there = torch.where(kept, slots.index_select(0, of), len(self._last_token) - 1)
            part = slice(first, first + len(each.of))
            first = part.stop
            if pending.simple is not None:
                _, temperatures, keys = pending.simple
                simple = there, temperatures[part], keys[part]
                found = sampler.sample_simple(pending.logits[part], *simple, self._last_token)
            else:
                own, at = pending.slots[each.of], pending.positions[each.of] + depth
                found = sampler.sample(pending.logits[part], own, at, self._last_token, kept=(kept, there))
            last.index_copy_(0, of, found.tokens)
            right.zero_().index_copy_(0, of, kept)
            launched.drafted.append((each, found.to_host()))

    def _choose(self, sampler: CudaSampler, pending: PendingSampling, masks: Masks | None) -> KernelSamples:
        """By kernels, into the slots' last tokens too."""
        if pending.graph:
            assert self.graphs is not None
            return KernelSamples(self.graphs.choose(pending.graph, masks.host if masks is not None else None))
        count = len(pending.slots)
        logits = pending.logits[:count]
        if pending.simple is not None:
            slots, temperatures, keys = (each[:count] for each in pending.simple)
            return sampler.sample_simple(logits, slots, temperatures, keys, self._last_token, masks)
        return sampler.sample(logits, pending.slots, pending.positions, self._last_token, masks)


def pool_states(pooling: Pooling, states: torch.Tensor) -> torch.Tensor:
    """states: final hidden states of a row [tokens, hidden], which the result does not keep in memory."""
    return states[-1].to(torch.float32, copy=True) if pooling is Pooling.LAST else states.float().sum(0)


def _add_pooled(rows: Sequence[RowResult], pooled: Mapping[int, torch.Tensor]) -> None:
    """Adds what was pooled, float32 [hidden] by the rows' places, to their results."""
    for i, state in pooled.items():
        vector = rows[i].pooled = state.numpy()
        if not np.isfinite(vector).all():
            rows[i].error = BAD_LOGITS
