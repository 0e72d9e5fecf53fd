"""Samples the tokens of launched steps, at once or, where a mask depends on a token that has not been read,
when the step before is read; and reads what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch

from baton.engine.batch import Ints
from baton.engine.chunk_graphs import ChunkGraphs
from baton.engine.cuda_sampler import CudaSampler
from baton.engine.device_slots import DeviceSlots
from baton.engine.grammar_masks import Masks
from baton.engine.launched_step import Chains, LaunchedStep, PendingSampling
from baton.engine.plan import Logprobs, Pooling, RowResult
from baton.engine.sampler import BAD_LOGITS, KeptToken, KernelSamples, Sampler, Samples, row_results
from baton.engine.sampler_ops import position_keys
from baton.engine.step_graphs import DecodeGraphs
from baton.layers.async_copy import Upload, to_device, to_host
from baton.layers.tensor_parallel import Communicator

Anything = TypeVar("Anything", Samples, KernelSamples)


class StepSampling:
    """How one runner samples the rows of its steps."""

    def __init__(
        self,
        sampler: Sampler | CudaSampler | None,
        slots: DeviceSlots,
        communicator: Communicator | None,
    ) -> None:
        """`sampler`: None on ranks but the first."""
        self._sampler, self._slots, self._communicator = sampler, slots, communicator
        self._last_token = slots.last_token
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
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
        logprobs: dict[int, Logprobs] = {}
        errors: dict[int, str] = {}
        for each in (samples, *launched.more):
            if each is not None:
                errors |= each.errors
                if each.logprobs is not None:
                    logprobs |= zip(each.logprob_rows, each.logprobs.read(each.logprob_counts), strict=True)
        kept: dict[int, list[KeptToken]] = {}
        if launched.right is not None:
            kept, firsts = self._kept(launched, tokens, finite, logprobs, errors), launched.firsts
            tokens, finite = [tokens[at] for at in firsts], [finite[at] for at in firsts]
            logprobs = {i: logprobs[at] for i, at in enumerate(firsts) if at in logprobs}
            errors = {i: errors[at] for i, at in enumerate(firsts) if at in errors}
        if self._communicator is not None:
            self._communicator.check()
        if launched.masks is not None:
            launched.masks.sampled(tokens[row] for row in launched.masks.rows)
        if late is not None:
            self._sample_late(late)
        rows = row_results(launched.rows, tokens, finite, logprobs, launched.prompts, errors, kept)
        if launched.row_order is not None:
            rows = itemgetter(*launched.row_order)(rows)
        _add_pooled(rows, launched.pooled)
        return rows

    def _kept(
        self,
        launched: LaunchedStep,
        tokens: Sequence[int],
        finite: Sequence[bool],
        logprobs: Mapping[int, Logprobs],
        errors: Mapping[int, str],
    ) -> dict[int, list[KeptToken]]:
        """By the index among the samples: what follows each behind right drafts. All arguments count what is
        wanted."""
        assert launched.right is not None and launched.slots is not None
        right = launched.right.numpy()
        if isinstance(self._sampler, CudaSampler):
            self._sampler.advance(launched.slots, right)
        return {
            i: [
                KeptToken(tokens[at], logprobs.get(at), finite[at], errors.get(at, ""))
                for at in range(first + 1, first + 1 + count)
            ]
            for i, (first, count) in enumerate(zip(launched.firsts, right.tolist(), strict=True))
            if count
        }

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
            if pending.chains is None:
                self._sample_on_host(sampler, launched, pending)
            else:
                self._sample_chains_on_host(sampler, launched, pending, pending.chains)
        elif sampler is not None:
            masks = None
            if pending.masked:
                masks = sampler.masks(pending.slots.tolist(), pending.masked)
            if pending.chains is None:
                samples = self._choose(sampler, pending, masks)
            else:
                samples = self._sample_chains(sampler, launched, pending, pending.chains, masks)
            launched.samples = samples.to_host()
            if masks is not None:
                masks.launched()
                launched.masks, errors = masks, masks.errors
                if launched.right is not None:
                    errors = {launched.firsts[row]: error for row, error in errors.items()}
                launched.samples.errors = errors
        if self._communicator is not None:
            # All ranks have rank 0's samples. They differ only in what it has just sampled.
            self._communicator.broadcast(self._slots.sampled)

    def _sample_on_host(self, sampler: Sampler, launched: LaunchedStep, pending: PendingSampling) -> None:
        slots = pending.slots
        launched.samples = sampler.sample(pending.logits, slots, pending.positions, pending.masks)
        there = to_device(slots, pending.logits.device)
        self._last_token.index_copy_(0, there, launched.samples.tokens.int())

    def _sample_chains_on_host(
        self, sampler: Sampler, launched: LaunchedStep, pending: PendingSampling, chains: Chains
    ) -> None:
        """Samples one position behind the other, where the drafts before it were right."""
        slots, logits, device = pending.slots, pending.logits, pending.logits.device
        firsts, drafts = chains.firsts, chains.drafts.cpu().numpy()
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)
        peaks = torch.zeros(len(logits), device=device)
        of, right = np.arange(len(slots)), np.zeros(len(slots), np.int32)
        last = np.zeros(len(slots), np.int64)
        for depth in range(int(chains.depths.max())):
            masks = pending.masks
            if depth:
                of = of[chains.depths[of] > depth]
                of = of[last[of] == drafts[firsts[of] + depth]]
                right[of] = depth
                masks = sampler.begin_masks(slots[of].tolist())
            if not of.size:
                break
            at = firsts[of] + depth
            there = to_device(at, device)
            samples = sampler.sample(logits[there], slots[of], pending.positions[of] + depth, masks)
            tokens[there], peaks[there] = samples.tokens, samples.peaks.float()
            last[of] = samples.tokens.cpu().numpy()
            launched.more.append(_moved(samples, at))
        launched.samples = Samples(tokens, peaks)
        self._verified(launched, slots, firsts, tokens.int(), torch.from_numpy(right))
        for memory, values in ((self._slots.right, right), (self._last_token, last.astype(np.int32))):
            memory.index_copy_(0, to_device(slots, device), to_device(values, device))

    def _sample_chains(
        self,
        sampler: CudaSampler,
        launched: LaunchedStep,
        pending: PendingSampling,
        chains: Chains,
        masks: Masks | None,
    ) -> KernelSamples:
        """Samples behind each draft, and decides on the device how many of them are right."""
        if pending.shape is not None:
            assert self.chunk_graphs is not None
            result, right = self.chunk_graphs.choose(pending.shape, len(chains.drafts), len(pending.slots))
        else:
            upload = Upload()
            for array in (pending.slots, chains.firsts, chains.depths):
                upload.add(array)
            slots, firsts, depths = upload.send(pending.logits.device)
            if pending.simple is not None:
                _, temperatures, seeds = pending.simple
                simple = temperatures, seeds, slots, firsts, depths
                result, right = self.choose_chains(pending.logits, chains, *simple)
            else:
                result, right = self._choose_in_rounds(
                    sampler, launched, pending, chains, masks, slots, firsts
                )
        self._verified(launched, pending.slots, chains.firsts, result[:, 0], right)
        return KernelSamples(result)

    def choose_chains(
        self,
        logits: torch.Tensor,
        chains: Chains,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        slots: torch.Tensor,
        firsts: torch.Tensor,
        depths: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples that depend on temperature and seed alone, at all positions at once; `seeds`: `seed_keys`;
        slots, firsts, depths [samples]. Result: int32 [wanted, 2] as in step_graphs.Inputs, and int32
        [samples]: how many drafts are right; into `out` if it is given."""
        from baton.layers.kernels.draft_steps import verify
        from baton.layers.kernels.sampling import sample

        device = logits.device
        result, right = out or (
            torch.empty(len(logits), 2, dtype=torch.int32, device=device),
            torch.empty(len(slots), dtype=torch.int32, device=device),
        )
        nowhere = torch.full_like(chains.positions, len(self._last_token) - 1)
        keys = position_keys(seeds, chains.positions + 1)
        sample(logits, temperatures, keys, nowhere, self._last_token, result)
        deepest, memory = int(chains.depths.max()), (self._last_token, self._slots.right, right)
        verify(result, chains.drafts, slots, firsts, depths, deepest, *memory)
        return result, right

    def _choose_in_rounds(
        self,
        sampler: CudaSampler,
        launched: LaunchedStep,
        pending: PendingSampling,
        chains: Chains,
        masks: Masks | None,
        slots: torch.Tensor,
        firsts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose_chains` for rows where what is sampled changes a slot's penalties: one position behind the
        other, of which only those that count change them."""
        logits, device, depths = pending.logits, pending.logits.device, chains.depths
        result = torch.empty(len(chains.drafts), 2, dtype=torch.int32, device=device)
        right = torch.zeros(len(slots), dtype=torch.int32, device=device)
        last = right
        if any(depths[row] > 1 for row in pending.masked):
            raise RuntimeError("a row with a grammar has drafts: its masks are not known yet")
        for depth in range(int(depths.max())):
            of = (depths > depth).nonzero()[0]
            there = to_device(of, device)
            at = firsts.index_select(0, there) + depth
            kept = None
            if depth:
                agree = last.index_select(0, there) == chains.drafts.index_select(0, at)
                counts = agree & (right.index_select(0, there) == depth - 1)
                right.index_add_(0, there, counts.int())
                padding = len(self._last_token) - 1
                kept = counts, torch.where(counts, slots.index_select(0, there), padding).int()
            found = sampler.sample(
                logits.index_select(0, at),
                pending.slots[of],
                chains.positions.index_select(0, at) + 1,
                self._last_token,
                masks if depth == 0 else None,
                kept,
            )
            result.index_copy_(0, at, found.result)
            last = last.index_copy(0, there, found.tokens)
            launched.more.append(_moved(found, chains.firsts[of] + depth))
        self._slots.right.index_copy_(0, slots, right)
        return result, right

    def _verified(
        self,
        launched: LaunchedStep,
        slots: Ints,
        firsts: Ints,
        tokens: torch.Tensor,
        right: torch.Tensor,
    ) -> None:
        launched.slots, launched.firsts = slots, firsts.tolist()
        launched.verified, launched.right = (tokens, right), to_host(right)

    def _choose(self, sampler: CudaSampler, pending: PendingSampling, masks: Masks | None) -> KernelSamples:
        """By kernels, into the slots' last tokens too."""
        if pending.graph:
            assert self.graphs is not None
            return KernelSamples(self.graphs.choose(pending.graph, masks.host if masks is not None else None))
        logits = pending.logits
        if pending.simple is not None:
            return sampler.sample_simple(logits, *pending.simple, self._last_token, masks)
        return sampler.sample(logits, pending.slots, pending.positions, self._last_token, masks)


def _moved(samples: Anything, at: Ints) -> Anything:
    """`samples`, whose rows are at these among those wanted."""
    samples.logprob_rows = [int(at[row]) for row in samples.logprob_rows]
    samples.errors = {int(at[row]): error for row, error in samples.errors.items()}
    if isinstance(samples, KernelSamples) and samples.logprobs is not None:
        samples.logprobs = samples.logprobs.to_host()
    return samples


def pool_states(pooling: Pooling, states: torch.Tensor) -> torch.Tensor:
    """states: final hidden states of a row [tokens, hidden], which the result does not keep in memory."""
    return states[-1].to(torch.float32, copy=True) if pooling is Pooling.LAST else states.float().sum(0)


def _add_pooled(rows: Sequence[RowResult], pooled: Mapping[int, torch.Tensor]) -> None:
    """Adds what was pooled, float32 [hidden] by the rows' indices, to their results."""
    for i, state in pooled.items():
        vector = rows[i].pooled = state.numpy()
        if not np.isfinite(vector).all():
            rows[i].error = BAD_LOGITS
