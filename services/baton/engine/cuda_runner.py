"""Executes step plans on an NVIDIA GPU: a model's body, paged attention, CUDA graphs for decode steps.

Nothing in `launch` waits for the device. Sampled token ids, page tables and all results stay on the device.
The mask of a row with a grammar depends on the token before it: where the step before has not been read,
`launch` leaves the sampling to `read` of that step, while the device runs the forward pass. A step of decode
rows needs one copy to the device (two when page tables or last tokens change) and one copy back, whose event
`read` waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np
import torch

from baton.attention.mixed import MixedAttention
from baton.attention.paged import GroupedAttention, HostRows, PagedAttention
from baton.engine.cuda_flight import CudaFlight
from baton.engine.cuda_graphs import (
    ChunkGraphs,
    ChunkInputs,
    DecodeGraphs,
    Inputs,
    Progress,
    batch_sizes,
    chunk_sizes,
)
from baton.engine.cuda_sampler import CudaSampler, logprobs_to_host, prompt_logprobs
from baton.engine.device_batch import Changes, DeviceSlots, Ints, Ragged, longest_first
from baton.engine.grammar_masks import Masks, MaskStats
from baton.engine.model_runner import add_pooled, pool_states
from baton.engine.plan import Logprobs, PlanRow, StepPlan, StepResult
from baton.engine.sampler import row_results
from baton.kvcache.kv_groups import places
from baton.kvcache.kv_pool import PagePool
from baton.layers.async_copy import Upload, to_device, to_host
from baton.models.body import Step, make_body
from baton.models.decoder import Decoder

Fresh = dict[int, int]
"""Last tokens of slots that the device does not have yet."""


class CudaRunner:
    """Implements `engine.plan.Runner` on one Hopper GPU; the pool has a spare page.

    Rows of one token attend together, longer ones together.
    """

    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        *,
        max_slots: int,
        token_budget: int,
        context_length: int,
        prefill_attention: type[PagedAttention] = MixedAttention,
        decode_attention: type[PagedAttention] = MixedAttention,
        graphs: bool = True,
        batch_invariant: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """`batch_invariant`: matrix products in an order that does not depend on the batch; together with
        batch-invariant attention, a sequence's tokens depend on the sequence alone. `token_budget`: no step
        has more tokens. `progress` is called as graphs are captured. Raises ValueError for a pool without a
        spare page."""
        from baton.layers.kernels.sampling import sample

        if len(pool.raw) == pool.num_pages:
            raise ValueError("the pool needs a spare page for rows that pad a batch")
        self.max_slots = max_slots
        self.vocab_size = model.config.vocab_size
        self._pool = pool
        self._device = pool.device
        self._communicator, self._samples = model.communicator, model.shard.rank == 0
        """Only rank 0 samples and has results."""
        width = -(-context_length // pool.layout.page_size)
        groups = pool.layout.groups
        self._slots = DeviceSlots(max_slots, width, pool.num_pages, self._device, len(groups))
        self._body = make_body(model, pool, self._slots.tables.unbind(1), context_length, batch_invariant)
        heads, options = model.heads, model.attention_options
        of_groups = [[options[layer] for layer in group.layers] for group in groups]
        views, where = list(zip(pool.groups, of_groups, strict=True)), places(groups)
        self._chunks = GroupedAttention([prefill_attention(view, heads, own) for view, own in views], where)
        self._singles = GroupedAttention([decode_attention(view, heads, own) for view, own in views], where)
        self._choose = sample
        self._sampler = CudaSampler(max_slots, self.vocab_size, self._device)
        self._late: CudaFlight | None = None
        """The last launched step, if its sampling is not enqueued yet."""
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        if graphs and decode_attention.graphs:
            with torch.inference_mode():
                logits = torch.empty(max_slots, self.vocab_size, dtype=model.dtype, device=self._device)
                self.graphs = DecodeGraphs(
                    batch_sizes(max_slots),
                    max_slots,
                    logits,
                    self._decode,
                    self._sample_plain,
                    self._sample_masked,
                    progress,
                )
                if prefill_attention.graphs and not batch_invariant:
                    # Chunk graphs attend to rows of one token as to chunks.
                    sizes = chunk_sizes(model.has_experts, token_budget, context_length)
                    self.chunk_graphs = ChunkGraphs(
                        sizes, max_slots, logits, self._small, self.graphs.pool, progress
                    )

    # --- a step -----------------------------------------------------------------------------------------

    @property
    def mask_stats(self) -> MaskStats:
        return self._sampler.grammars.stats

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CudaFlight:
        """Enqueues the step."""
        for source, destination in plan.copies:
            self._pool.copy_page(source, destination)
        if plan.copies and not plan.rows and self._communicator is not None:
            # What has retired on rank 0 has everywhere. A step of rows ends with a sum anyway.
            self._communicator.all_reduce(torch.zeros(1, device=self._device))
        fresh = self._init_slots(plan)
        flight = CudaFlight(plan.number, plan.rows, torch.cuda.Event())  # type: ignore[no-untyped-call]
        if plan.rows:
            graphs = self.graphs
            try:
                if graphs is not None and _is_decode(plan.rows) and len(plan.rows) <= graphs.largest:
                    self._launch_graph(graphs, plan.rows, fresh, flight)
                else:
                    self._launch_ragged(plan.rows, fresh, flight)
            except BaseException:
                self._slots.forget(plan.rows)
                raise
        if flight.late is None:
            flight.done.record()
        else:
            self._late = flight
        return flight

    @torch.inference_mode()
    def warm(self) -> None:
        """Does everything that a launch does except replaying the graph, for StepLoop. Changes nothing
        that a sequence sees."""
        self._update(self._slots.unchanging)
        none = np.zeros(0, np.int64)
        simple = self._sampler.simple(none, none)
        if self.graphs is not None:
            self.graphs.fill(none, none, simple)
        to_host(self._slots.last_token[:1])
        torch.cuda.Event().record()  # type: ignore[no-untyped-call]

    def done(self, flight: CudaFlight) -> bool:
        # Sampling that still waits will never run: the step before has been read, and has failed.
        return flight.late is not None or bool(flight.done.query())  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def read(self, flight: CudaFlight) -> StepResult:
        """Waits for the step and returns its tokens."""
        # Whatever fails here, the sampling that waited for these tokens must not run later: its slots and its
        # logits may then be another step's.
        late, self._late = self._late, None
        if flight.late is not None:
            raise RuntimeError("the step before it failed")
        if flight.failed is not None:
            raise flight.failed
        flight.done.synchronize()
        if self._communicator is not None:
            self._communicator.check()
        tokens: list[int] = []
        finite: list[bool] = []
        if flight.result is not None:
            result = flight.result.numpy()
            tokens = result[:, 0].tolist()
            finite = np.isfinite(result[:, 1].view(np.float32)).tolist()
        if flight.masks is not None:
            flight.masks.sampled(tokens[row] for row in flight.masks.rows)
        if late is not None:
            late.sample_late()
        logprobs: dict[int, Logprobs] = {}
        samples = flight.samples
        if samples is not None and samples.logprobs is not None:
            logprobs = dict(zip(samples.logprob_rows, samples.logprobs.read(samples.wanted), strict=True))
        errors = flight.masks.errors if flight.masks is not None else {}
        rows = row_results(flight.rows, tokens, finite, logprobs, flight.prompts, errors)
        if flight.places is not None:
            rows = itemgetter(*flight.places)(rows)
        add_pooled(rows, flight.pooled)
        return StepResult(flight.number, rows)

    def _init_slots(self, plan: StepPlan) -> Fresh:
        fresh: Fresh = {}
        for init in plan.inits:
            if self._samples:
                self._sampler.init(init)
            if init.last_token is not None:
                fresh[init.slot] = init.last_token
        return fresh

    def _update(self, changes: Changes) -> None:
        upload = Upload()
        for array in changes:
            upload.add(array)
        self._slots.write(*upload.send(self._device))

    # --- decode steps, by graph -------------------------------------------------------------------------

    def _launch_graph(
        self,
        graphs: DecodeGraphs,
        rows: Sequence[PlanRow],
        fresh: Fresh,
        flight: CudaFlight,
    ) -> None:
        changes = self._slots.changes(rows, fresh)
        if changes is not None:
            self._update(changes)
        slots = np.array([row.slot for row in rows])
        positions = np.array([row.start for row in rows])
        moved = longest_first(positions)
        if moved is not None:
            order, flight.places = moved
            slots, positions = slots[order], positions[order]
        simple = self._sampler.simple(slots, positions + 1) if self._samples else None
        graphs.fill(slots, positions, simple, self._sampler.grammars.constrained(slots.tolist()))
        graphs.replay(len(rows))
        logits = graphs.logits(len(rows))

        def choose(masks: Masks | None) -> torch.Tensor:
            return graphs.choose(len(rows), masks.host if masks is not None else None)

        self._sample(logits, slots, positions + 1, flight, choose if simple is not None else None)

    def _decode(self, inputs: Inputs) -> None:
        """A decode step up to its logits. Captured in a graph."""
        tables = self._slots.tables.index_select(0, inputs.slots)
        attend = self._singles.over(tables, inputs.positions + 1)
        tokens = self._slots.last_token.index_select(0, inputs.slots)
        step = Step(tokens, inputs.positions, inputs.slots, self._slots.damage, attend, decode=True)
        self._body.logits(self._forward(step), inputs.logits)

    def _sample_plain(self, inputs: Inputs) -> None:
        """Sampling after it with a temperature only. Captured in a graph."""
        last = self._slots.last_token
        self._choose(inputs.logits, inputs.temperatures, inputs.keys, inputs.slots, last, inputs.result)

    def _sample_masked(self, inputs: Inputs) -> None:
        """Samples under grammar masks. Captured in a graph."""
        self._choose(
            inputs.logits,
            inputs.temperatures,
            inputs.keys,
            inputs.slots,
            self._slots.last_token,
            inputs.result,
            masks=(inputs.words, inputs.masked),
        )

    # --- all other steps --------------------------------------------------------------------------------

    def _launch_ragged(self, rows: Sequence[PlanRow], fresh: Fresh, flight: CudaFlight) -> None:
        step = Ragged.of(rows)
        wholly = any(row.prompt_logprobs or row.pooling is not None for row in rows)
        shape = self.chunk_graphs.shape(step) if self.chunk_graphs is not None and not wholly else None
        plain = self._samples and step.slots.size
        simple = self._sampler.simple(step.slots, step.targets) if plain else None
        temperatures, keys = simple or (np.zeros(0, np.float32), np.zeros(0, np.int64))
        changes = self._slots.changes(step.rows, fresh) or ()
        upload = Upload()
        for array in (step.slots.astype(np.int32), temperatures, keys, *changes):
            upload.add(array)
        slots, temperatures_there, keys_there, *changes_there = upload.send(self._device)
        if changes_there:
            self._slots.write(*changes_there)
        if shape is not None and self.chunk_graphs is not None:
            logits = self.chunk_graphs.run(shape, step)
        else:
            logits = self._eager(step, wholly, flight)
        if not step.slots.size:
            return

        def choose(masks: Masks | None) -> torch.Tensor:
            result = torch.empty(len(step.slots), 2, dtype=torch.int32, device=self._device)
            last, allowed = self._slots.last_token, None
            if masks is not None:
                allowed = masks.on(self._device), to_device(masks.places(len(step.slots)), self._device)
            self._choose(logits, temperatures_there, keys_there, slots, last, result, masks=allowed)
            return result

        self._sample(logits, step.slots, step.targets, flight, choose if simple is not None else None)

    def _small(self, inputs: ChunkInputs) -> None:
        """A small step up to its logits. Captured in a graph."""
        tables = self._slots.tables.index_select(0, inputs.row_slots)
        attend = self._chunks.over(tables, inputs.lengths, inputs.starts, len(inputs.ids))
        tokens = self._tokens(inputs.ids, inputs.token_slots)
        step = Step(tokens, inputs.positions, inputs.token_slots, self._slots.damage, attend, inputs.last)
        self._body.logits(self._forward(step), inputs.logits)

    def _forward(self, step: Step) -> torch.Tensor:
        """Final hidden states [wanted tokens, hidden], which are no numbers where values were none."""
        hidden = self._body.forward(step)
        slots = step.slots if step.wanted is None else step.slots.index_select(0, step.wanted)
        return hidden.add_(step.damage.index_select(0, slots)[:, None])

    def _tokens(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.where(ids < 0, self._slots.last_token.index_select(0, slots), ids)

    def _eager(self, step: Ragged, wholly: bool, flight: CudaFlight) -> torch.Tensor:
        """Returns the logits [samples, vocab] of a step of any size. `wholly`: also computes prompt
        log-probabilities and what is pooled, into `flight`."""
        single = step.single
        upload = Upload()
        for array in (
            step.ids,
            step.positions,
            step.token_slots,
            step.row_slots,
            step.lengths,
            step.starts[single:] - single,
            step.last,
        ):
            upload.add(array)
        ids, positions, token_slots, row_slots, lengths, starts, last = upload.send(self._device)
        width = -(-int(step.lengths.max()) // self._pool.layout.page_size)
        tables = self._slots.tables[..., :width].index_select(0, row_slots)
        singles = chunks = None
        if single:
            host = HostRows(step.counts[:single], step.lengths[:single])
            singles = self._singles.over(tables[:single], lengths[:single], host=host)
        if single < len(step.rows):
            host = HostRows(step.counts[single:], step.lengths[single:])
            longest = int(step.counts.max())
            chunks = self._chunks.over(tables[single:], lengths[single:], starts, longest, host)

        def attend(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            if singles is not None:
                singles(layer, q[:single], out[:single])
            if chunks is not None:
                chunks(layer, q[single:], out[single:])

        tokens, wanted = self._tokens(ids, token_slots), None if wholly else last
        decode = single == len(step.rows)
        damage = self._slots.damage
        hidden = self._forward(Step(tokens, positions, token_slots, damage, attend, wanted, decode))
        for i, row, start in zip(step.order, step.rows, step.starts.tolist(), strict=False):
            states = hidden[start : start + row.count] if wholly else hidden
            if row.pooling is not None and self._samples:
                flight.pooled[i] = to_host(pool_states(row.pooling, states))
            if row.prompt_logprobs:
                found = prompt_logprobs(self._body.logits, states, row, self._samples)
                flight.prompts[i] = found
        return self._body.logits(hidden.index_select(0, last) if wholly else hidden)

    # --- sampling ---------------------------------------------------------------------------------------

    def _sample(
        self,
        logits: torch.Tensor,
        slots: Ints,
        positions: Ints,
        flight: CudaFlight,
        choose: Callable[[Masks | None], torch.Tensor] | None,
    ) -> None:
        """Enqueues the sampling, or leaves it to `flight.late`. choose: enqueues it and returns its result,
        of slots whose sampling depends on temperatures and masks only."""
        if not self._samples:
            self._share_tokens()
            return
        grammars, own = self._sampler.grammars, slots.tolist()
        rows = grammars.constrained(own)

        def sample() -> None:
            masks = flight.masks = self._sampler.masks(own, rows) if rows else None
            if choose is not None:
                result, samples = choose(masks), None
            else:
                result, samples = self._sampler.sample(
                    logits, slots, positions, self._slots.last_token, masks
                )
            if masks is not None:
                masks.launched()
            flight.result = to_host(result)
            self._share_tokens()
            if samples is not None and samples.logprobs is not None:
                samples.logprobs = logprobs_to_host(samples.logprobs)
                flight.samples = samples

        if grammars.ready(own, rows):
            sample()
        else:
            flight.late = sample

    def _share_tokens(self) -> None:
        """Enqueues that all ranks have rank 0's last tokens. They differ only in what it has just sampled."""
        if self._communicator is not None:
            self._communicator.broadcast(self._slots.last_token)


def _is_decode(rows: Sequence[PlanRow]) -> bool:
    """Whether each row continues its slot by one token."""
    return all(row.tokens is None and row.sample == (row.slot,) for row in rows)
