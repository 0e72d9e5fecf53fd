"""Executes step plans: a model's body, its KV pool, attention and sampling on one device.

With kernels (on a Hopper GPU) nothing in `launch` waits for the device: sampled token ids, page tables and
all results stay there. Decode steps and small steps with prompt chunks are CUDA graphs. A decode step needs
one copy to the device (two when page tables or last tokens change) and one copy back, whose event `read`
waits for. The mask of a row with a grammar depends on the token before it: where the step before has not been
read, `launch` leaves the sampling to `read` of that step, while the device runs the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from baton.attention.base import AttentionBackend, AttentionRows
from baton.attention.mixed import MixedAttention
from baton.attention.paged import PagedAttention
from baton.attention.state_runs import state_pieces
from baton.attention.step import ModelAttention
from baton.engine.batch import HostBatch, longest_first, row_shifts
from baton.engine.captured_work import CapturedWork, final_states
from baton.engine.chunk_graphs import ChunkGraphs, chunk_shapes, chunk_sizes, draft_shapes
from baton.engine.cuda_sampler import CudaSampler
from baton.engine.device_slots import Changes, DeviceSlots
from baton.engine.draft.base import Drafter
from baton.engine.grammar_masks import MaskStats
from baton.engine.images import ImageEncoder
from baton.engine.launched_step import Chains, LaunchedStep, PendingSampling
from baton.engine.plan import PlanRow, StepPlan, StepResult
from baton.engine.sampler import Sampler, prompt_logprobs
from baton.engine.step_graphs import DecodeGraphs, Progress, batch_sizes
from baton.engine.step_sampling import StepSampling, pool_states
from baton.kvcache.kv_pool import PagePool
from baton.layers.async_copy import Upload, to_device, to_host
from baton.layers.batch import Batch, HiddenTap, LayerCache, StateCache, StateRows
from baton.models.body import Body
from baton.models.decoder import Decoder, LanguageModel


class ModelRunner:
    """Implements `engine.plan.Runner`. Rows of one token attend together, longer ones together."""

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        *,
        max_slots: int,
        context_length: int = 0,
        token_budget: int = 0,
        prefill_attention: type[AttentionBackend] = MixedAttention,
        decode_attention: type[AttentionBackend] = MixedAttention,
        kernels: bool = False,
        graphs: bool = True,
        batch_invariant: bool = False,
        draft_tokens: int = 0,
        progress: Progress | None = None,
        tap: tuple[int, ...] = (),
    ) -> None:
        """`kernels`: layers write into the pool, and tokens are sampled, by Hopper's kernels; only then there
        are `graphs`, and `batch_invariant`: matrix products in an order that does not depend on the batch;
        together with batch-invariant attention, a sequence's tokens depend on the sequence alone.
        `context_length`: positions that will be used; 0: the model's. `token_budget`: no step has more
        tokens; `draft_tokens`: no row has more drafts. `tap`: results have these hidden states, see
        `HiddenTap.layers`. `progress` is called as graphs are captured. Raises ValueError for a pool without
        a spare page where rows may pad a batch, and for a model that cannot be computed invariantly."""
        if kernels and len(pool.raw) == pool.num_pages:
            raise ValueError("the pool needs a spare page for rows that pad a batch")
        self._tap, self.max_slots = tap, max_slots
        self.vocab_size, self.kernels = model.config.vocab_size, kernels
        self._model, self._pool, self._device = model, pool, pool.device
        self._communicator = model.communicator
        context = context_length or model.config.used_length
        self._paged = any(issubclass(each, PagedAttention) for each in (prefill_attention, decode_attention))
        """Whether attention follows page tables on the device."""
        layout = pool.layout
        self._slots = DeviceSlots(
            max_slots,
            -(-context // layout.page_size) if self._paged else 0,
            min(pool.num_pages, len(pool.raw) - 1),
            self._device,
            len(layout.groups),
        )
        self._attention = ModelAttention(
            pool, model.heads, model.attention_options, prefill_attention, decode_attention
        )
        tables = self._slots.tables.unbind(1)
        indices = sorted(self._attention.indices.items()) if kernels else []
        self._caches = [
            LayerCache(tables[group], pool.layer_pages(layer))
            if group < len(pool.groups)
            else StateCache(tables[group], pool.state(group, index), layout.page_size)
            for layer, (group, index) in indices
        ]
        self._body, self._invariant = Body(model, kernels, context, batch_invariant), batch_invariant
        if batch_invariant and draft_tokens and pool.states:
            raise ValueError("drafts go through recurrent layers in another order: leave out --draft")
        for module in model.recurrent if isinstance(model, Decoder) else ():
            module.keep_drafts(max_slots, draft_tokens)
        sampler: Sampler | CudaSampler | None = None
        if model.shard.rank == 0:
            make = CudaSampler if kernels else Sampler
            sampler = make(max_slots, self.vocab_size, self._device)
        self._sampler = sampler
        """Only rank 0 samples and has results."""
        tower = None if kernels and self._communicator is not None else model.vision  # has not been tried
        ranks = self._communicator, model.shard.rank
        self.images = None if tower is None else ImageEncoder(tower, *ranks)
        self._sampling = StepSampling(sampler, self._slots, model.communicator)
        self.drafter: Drafter | None = None
        """Whose guesses rows may have of which the host does not know the tokens."""
        self._tap_buffer: torch.Tensor | None = None
        """[tokens, values]: what graphs write of `tap`."""
        self.graphs: DecodeGraphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        if kernels and graphs and getattr(decode_attention, "graphs", False):
            assert isinstance(model, Decoder)
            with torch.inference_mode():
                # Longer rows of models with states are divided on the host, as are those with drafts.
                chunks = not pool.states and getattr(prefill_attention, "graphs", False)
                shapes = draft_shapes(draft_tokens, max_slots) if chunks else []
                most = max([max_slots, *(shape.num_logits for shape in shapes)])
                logits = torch.empty(most, self.vocab_size, dtype=model.dtype, device=self._device)
                sizes = chunk_sizes(bool(model.mixtures), token_budget, context)
                if tap:
                    values = len(tap) * model.config.hidden_size
                    self._tap_buffer = logits.new_empty(max(most, *sizes, 0), values)
                where = self._slots, self._caches, self._attention, self._sampling
                more = tap, self._tap_buffer, model.vision is not None, batch_invariant and bool(pool.states)
                work = CapturedWork(self._body, *where, *more)
                works = work.decode, work.sample_plain, work.sample_masked
                self.graphs = DecodeGraphs(batch_sizes(max_slots), max_slots, logits, *works, progress)
                self._sampling.graphs = self.graphs
                if chunks and not batch_invariant:
                    # Chunk graphs attend to rows of one token as to chunks.
                    shapes += chunk_shapes(sizes, max_slots)
                    chunk_works = work.small, work.sample_drafts
                    self.chunk_graphs = ChunkGraphs(
                        shapes, max_slots, logits, *chunk_works, self.graphs.pool, draft_tokens, progress
                    )
                    self._sampling.chunk_graphs = self.chunk_graphs

    @property
    def mask_stats(self) -> MaskStats:
        return MaskStats() if self._sampler is None else self._sampler.grammars.stats

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueues the step; on a CPU, computes it."""
        if plan.copies:
            self._copy(plan)
        fresh: dict[int, int] = {}
        for init in plan.inits:
            if self._sampler is not None:
                self._sampler.init(init)
            if init.last_token is not None:
                fresh[init.slot] = init.last_token
        launched = LaunchedStep(plan.number, plan.rows)
        if self._device.type == "cuda":
            launched.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if plan.rows:
            graphs = self.graphs
            try:
                if graphs is not None and _is_decode(plan.rows) and len(plan.rows) <= graphs.largest:
                    self._launch_graph(graphs, plan.rows, fresh, launched)
                else:
                    self._launch_ragged(plan.rows, fresh, launched)
            except BaseException:
                self._slots.forget(plan.rows)
                raise
        self._sampling.launched(launched)
        if self.drafter is not None and launched.verified is not None and launched.tapped is not None:
            self.drafter.follow(launched)
        if self.images is not None:
            launched.encode_seconds = self.images.seconds()
        return launched

    @torch.inference_mode()
    def warm(self) -> None:
        """Does on a GPU all that a launch does but replay the graph, for StepLoop; no sequence sees it."""
        self._write_slots(self._slots.unchanging)
        none = np.zeros(0, np.int64)
        simple = self._sampler.simple(none, none) if isinstance(self._sampler, CudaSampler) else None
        if self.graphs is not None:
            self.graphs.fill(none, none, none.astype(np.int32), simple)
        to_host(self._slots.last_token[:1])
        torch.cuda.Event().record()  # type: ignore[no-untyped-call]

    def done(self, launched: LaunchedStep) -> bool:
        # Sampling that still waits will never run: the step before has been read, and has failed.
        event = launched.done
        return launched.late is not None or event is None or bool(event.query())  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def read(self, launched: LaunchedStep) -> StepResult:
        """Waits for the step and returns its tokens."""
        rows = self._sampling.read(launched)
        for i, hidden in launched.hidden.items():
            row, result = launched.rows[i], rows[i]
            result.hidden = hidden[: len(result.tokens)] if row.tokens is None else hidden
        return StepResult(launched.number, rows, launched.encode_seconds)

    @torch.inference_mode()
    def hidden_states(self, row: PlanRow) -> torch.Tensor:
        """Computes one row of tokens: final hidden states [tokens, hidden]."""
        host = HostBatch.of([row])
        self._write_slots(self._slots.changes(host.rows, {}))
        return final_states(self._body, self._batch(host, every=True))

    def _copy(self, plan: StepPlan) -> None:
        """Copies pages. Of ranks that hold the same heads in one pool the first does, and others wait."""
        pool, shared = self._pool, False
        if self._communicator is not None and self._device.type == "cpu":
            shared = pool.heads != (0, pool.layout.num_kv_heads) or pool.layout.layouts[0].parts == 1
        if not shared or self._model.shard.keeps(max(each.heads for each in self._model.caches)):
            for source, destination in plan.copies:
                pool.copy_page(source, destination)
        # What has retired on rank 0 has everywhere. On GPUs a step of rows ends with a sum anyway.
        if self._communicator is not None and (shared or not plan.rows):
            self._communicator.all_reduce(torch.zeros(1, device=self._device))

    def _write_slots(self, changes: Changes | None) -> None:
        if changes is not None:
            self._slots.write(*self._there(*changes))

    def _there(self, *arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """The arrays on the device, in one copy."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        upload = Upload()
        for array in arrays:
            upload.add(array)
        return upload.send(self._device)

    def _launch_graph(
        self, graphs: DecodeGraphs, rows: Sequence[PlanRow], fresh: Mapping[int, int], launched: LaunchedStep
    ) -> None:
        self._write_slots(self._slots.changes(rows, fresh))
        slots = np.array([row.slot for row in rows])
        positions, shifts = np.array([row.start for row in rows]), row_shifts(rows)
        moved = longest_first(positions)
        if moved is not None:
            order, launched.row_order = moved
            slots, positions, shifts = slots[order], positions[order], shifts[order]
        sampler, simple = self._sampler, None
        masked: list[int] = []
        if isinstance(sampler, CudaSampler):
            simple = sampler.simple(slots, positions + 1)
            masked = sampler.grammars.constrained(slots.tolist())
        graphs.fill(slots, positions, shifts, simple, masked)
        graphs.replay(len(rows))
        self._keep_tapped(launched, range(len(rows)) if moved is None else order.tolist(), [1] * len(rows))
        pending = PendingSampling(graphs.logits(len(rows)), slots, positions + 1, masked)
        pending.graph = len(rows) if simple is not None else 0
        self._sampling.sample(launched, pending)

    def _launch_ragged(
        self, rows: Sequence[PlanRow], fresh: Mapping[int, int], launched: LaunchedStep
    ) -> None:
        host = HostBatch.of(rows)
        sampler = self._sampler
        # A CPU computes the masks while another thread of it runs the forward pass.
        masked = sampler.grammars.constrained(host.slots.tolist()) if sampler is not None else []
        masks = sampler.begin_masks(host.slots.tolist()) if isinstance(sampler, Sampler) else None
        every = any(row.prompt_logprobs or row.pooling is not None for row in rows)
        by_graphs = self.chunk_graphs is not None and not every and not host.looks
        shape = self.chunk_graphs.shape(host) if by_graphs and self.chunk_graphs is not None else None
        chained = host.chained
        if shape is None and (host.follows or host.guesses.size):
            host = HostBatch.of(self._settled(rows))
        simple = None
        if isinstance(sampler, CudaSampler) and host.slots.size:
            if not chained:
                simple = sampler.simple(host.slots, host.targets)
            elif not masked:
                simple = sampler.simple_chains(host.slots, host.depths)
        by_graph = chained and simple is not None and shape is not None and shape.few
        changes = self._slots.changes(host.rows, fresh)
        arrays = (host.slots.astype(np.int32), *simple) if simple is not None and not by_graph else ()
        there = self._there(*arrays, *(changes or ()))
        if changes is not None:
            self._slots.write(*there[-2:])
        chains = None
        if shape is not None and self.chunk_graphs is not None:
            guesses = None if self.drafter is None else self.drafter.guesses
            logits = self.chunk_graphs.run(shape, host, simple if by_graph else None, guesses)
            self._keep_tapped(launched, host.order, [row.count for row in host.rows])
            if chained:
                chains = Chains(host.depths, *self.chunk_graphs.settled(shape, len(host.logits_indices)))
        else:
            batch = self._batch(host, every)
            logits = self._eager(batch, host, every, launched)
            if chained:
                self._slots.unsettle(to_device(host.row_slots.astype(np.int64), self._device))
                indices = to_device(host.logits_indices, self._device)
                where = batch.tokens.index_select(0, indices), batch.positions.index_select(0, indices)
                chains = Chains(host.depths, *where)
        if host.slots.size:
            pending = PendingSampling(logits, host.slots, host.targets, masked, chains, masks)
            if by_graph:
                pending.shape = shape
            elif simple is not None:
                pending.simple = there[0], there[1], there[2]
            self._sampling.sample(launched, pending)

    def _keep_tapped(self, launched: LaunchedStep, order: Iterable[int], counts: list[int]) -> None:
        """Copies what a graph has written for rows of so many tokens; `order`: theirs in the plan."""
        if self._tap_buffer is not None:
            whole, order = self._tap_buffer[: sum(counts)].clone(), list(order)
            launched.tapped, launched.tapped_at = whole, dict(zip(order, _firsts(counts), strict=True))
            launched.hidden = dict(zip(order, torch.split(whole, counts), strict=True))

    def _settled(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        """Waits for the step before, and for guesses. For steps without a graph: those are long."""
        right = self._slots.right.tolist()
        guesses = None if self.drafter is None else self.drafter.guesses
        known = [] if guesses is None else guesses.tolist()
        return [row.settled(right[row.slot], known) for row in rows]

    def _batch(self, host: HostBatch, every: bool) -> Batch:
        """`every`: the states of every token are wanted, else of those that are sampled from."""
        single, arrays = host.single, [host.ids, host.positions, host.token_slots, host.logits_indices]
        if self._paged:
            arrays += [host.row_slots, host.lengths, host.starts[single:] - single]
        divided: list[torch.Tensor] | None = None
        alone = 0 if self._invariant else single
        """Rows whose states kernels take in as rows of one token."""
        if self.kernels and self._pool.states and not any(row.drafts or row.replay for row in host.rows):
            longer = host.rows[alone:]
            arrays += state_pieces(longer, alone, self._pool.layout.page_size) if longer else ()
            divided = []
        ids, positions, token_slots, indices, *paged = self._there(*arrays)
        if divided is not None:
            paged, divided = paged[:3], paged[3:]
        parts = []
        if single:
            parts.append(AttentionRows(host.rows[:single], 0, single))
        if single < len(host.rows):
            longer = host.rows[single:]
            parts.append(AttentionRows(longer, single, host.tokens - single, longest=host.longest))
        if self._paged:
            row_slots, lengths, starts = paged
            width = -(-int(host.lengths.max()) // self._pool.layout.page_size)
            tables = self._slots.tables[..., :width].index_select(0, row_slots)
            for part, at in zip(parts, [slice(0, single), slice(single, None)][single == 0 :], strict=False):
                part.tables, part.lengths = tables[at].unbind(1), lengths[at]
                part.starts = None if part.longest == 1 else starts
        axes, embeddings = None, None
        states: StateRows | None = None
        if divided is not None:
            pieces, begins = divided or (None, None)
            states = StateRows(alone, pieces, begins, self._invariant)
        if any(row.images for row in host.rows):
            if self.images is None:
                raise ValueError("images are computed by models with a vision tower only")
            axes, embeddings = self.images.lanes(host, self._device)
        return Batch(
            self._slots.tokens(ids, token_slots),
            positions,
            self._attention.over(*parts),
            self._caches,
            token_slots,
            self._slots.nan_flags,
            None if every else indices,
            few=single == len(host.rows),
            axes=axes,
            embeddings=embeddings,
            states=states,
        )

    def _eager(self, batch: Batch, host: HostBatch, every: bool, launched: LaunchedStep) -> torch.Tensor:
        """Returns the logits [wanted tokens, vocab] of a step of any size. `every`: also computes prompt
        log-probabilities and what is pooled, into `launched`."""
        layers = tuple(sorted({*self._tap, *(layer for row in host.rows for layer in row.hidden_layers)}))
        if layers:
            batch.tap = HiddenTap(layers)
        hidden = final_states(self._body, batch)
        if batch.tap is not None:
            launched.hidden = self._tapped(batch.tap.found, host, launched)
        if every:
            leads = self._sampler is not None
            for i, row, start in zip(host.order, host.rows, host.starts.tolist(), strict=False):
                states = hidden[start : start + row.count]
                if row.pooling is not None and leads:
                    launched.pooled[i] = to_host(pool_states(row.pooling, states))
                if row.prompt_logprobs:
                    launched.prompts[i] = prompt_logprobs(self._body.logits, states, row, leads)
            hidden = hidden.index_select(0, to_device(host.logits_indices, self._device))
        return self._body.logits(hidden) if len(hidden) or self.kernels else hidden

    def _tapped(
        self, found: Mapping[int, torch.Tensor], host: HostBatch, launched: LaunchedStep
    ) -> dict[int, torch.Tensor]:
        """RowResult.hidden of each row that is to have it, unless the model lacks one of the row's layers.
        `found`: of each layer, of all tokens."""
        tapped: dict[int, torch.Tensor] = {}
        if self._tap and found.keys() >= set(self._tap):
            whole = torch.cat([found[layer] for layer in self._tap], -1)
            counts = [row.count for row in host.rows]
            launched.tapped = whole
            launched.tapped_at = dict(zip(host.order, _firsts(counts), strict=True))
            parts = torch.split(whole, counts)
            tapped = dict(zip(host.order, parts, strict=True))
        for i, row, start in zip(host.order, host.rows, host.starts.tolist(), strict=False):
            if row.hidden_layers:
                tapped.pop(i, None)
            if row.hidden_layers and found.keys() >= set(row.hidden_layers):
                tapped_layers = [found[layer][start : start + row.count] for layer in row.hidden_layers]
                tapped[i] = torch.cat(tapped_layers, -1)
        return tapped


def _firsts(counts: Sequence[int]) -> list[int]:
    """Where each of several parts begins, which lie one behind the other."""
    return list(accumulate(counts, initial=0))[:-1]


def _is_decode(rows: Sequence[PlanRow]) -> bool:
    """Whether each row continues its slot by one token."""
    return all(
        row.tokens is None and not (row.drafts or row.ahead or row.replay) and row.sample == (row.slot,)
        for row in rows
    )
