"""Executes step plans on an NVIDIA GPU: fused kernels, paged attention, CUDA graphs for decode steps.

Nothing in `launch` waits for the device. Ids of sampled tokens, page tables and all that a step computes stay
there; a step is one copy up (two when page tables change) and one down, whose event `read` waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.attention.mixed import MixedAttention
from baton.attention.paged import PagedAttention, PagedRows
from baton.engine.cuda_sampler import CudaSampler
from baton.engine.graphs import DecodeGraphs, Inputs, Progress, batch_sizes
from baton.engine.page_tables import PageTables
from baton.engine.plan import Logprobs, PlanRow, StepPlan, StepResult
from baton.engine.results import row_results
from baton.engine.sampler import Samples, TokenLogprobs, token_logprobs
from baton.engine.upload import Upload, to_device, to_host
from baton.kvcache.pool import KvPool
from baton.models.decoder import Model

_LOGITS_ROWS = 64
"""Prompt log-probabilities are computed for so many positions at a time, to bound their memory."""

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class CudaFlight:
    """A launched step: what arrives in pinned memory once `done` has happened, and whose it is."""

    number: int
    rows: tuple[PlanRow, ...]
    done: torch.cuda.Event
    result: torch.Tensor | None = None
    """int32 [sampled slots, 2]: the token, and the bits of the largest logit."""
    samples: Samples | None = None
    """Of sampling that the result does not tell everything about."""
    prompts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class CudaRunner:
    """Implements `engine.runner.Runner` on one Hopper GPU; the pool has a spare page.

    Rows of one token attend together, longer ones together.
    """

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        *,
        max_slots: int,
        context_length: int,
        prefill_attention: type[PagedAttention] = MixedAttention,
        decode_attention: type[PagedAttention] = MixedAttention,
        graphs: bool = True,
        batch_invariant: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """`batch_invariant`: matrix products in an order that the batch has no say in; with attention of that
        kind a sequence's tokens depend on itself alone. `progress` is called as graphs are captured. Raises
        ValueError for a pool without a spare page."""
        from baton.layers.kernels.sampling import sample
        from baton.models.fused import FusedDecoder

        if not pool.spare:
            raise ValueError("the pool needs a spare page for rows that pad a batch")
        self.max_slots = max_slots
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._pool = pool
        self._device = pool.device
        width = -(-context_length // pool.layout.page_size)
        self._tables = PageTables(max_slots, width, pool.num_pages, self._device)
        self._decoder = FusedDecoder(
            model, pool, self._tables.table, context_length, invariant=batch_invariant
        )
        self._chunks: PagedAttention = prefill_attention(pool, model.config.num_heads)
        self._singles: PagedAttention = decode_attention(pool, model.config.num_heads)
        self._choose = sample
        self._sampler = CudaSampler(max_slots, self.vocab_size, self._device)
        self._last_token = torch.zeros(max_slots + 1, dtype=torch.int32, device=self._device)
        self.graphs: DecodeGraphs | None = None
        if graphs:
            with torch.inference_mode():
                logits = torch.empty(max_slots, self.vocab_size, dtype=model.dtype, device=self._device)
                self.graphs = DecodeGraphs(
                    batch_sizes(max_slots), max_slots, logits, self._decode, self._sample_plain, progress
                )

    # --- a step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CudaFlight:
        """Enqueues the step."""
        for source, destination in plan.copies:
            self._pool.copy_page(source, destination)
        self._init_slots(plan)
        flight = CudaFlight(plan.number, plan.rows, torch.cuda.Event())  # type: ignore[no-untyped-call]
        if plan.rows:
            graphs = self.graphs
            try:
                if graphs is not None and _is_decode(plan.rows) and len(plan.rows) <= graphs.largest:
                    self._launch_graph(graphs, plan.rows, flight)
                else:
                    self._launch_eager(plan.rows, flight)
            except BaseException:
                self._tables.forget()
                raise
        flight.done.record()
        return flight

    def read(self, flight: CudaFlight) -> StepResult:
        """Waits for the step and yields its tokens."""
        flight.done.synchronize()
        tokens: list[int] = []
        finite: list[bool] = []
        if flight.result is not None:
            result = flight.result.numpy()
            tokens = result[:, 0].tolist()
            finite = np.isfinite(result[:, 1].view(np.float32)).tolist()
        logprobs: dict[int, Logprobs] = {}
        samples = flight.samples
        if samples is not None and samples.logprobs is not None:
            logprobs = dict(zip(samples.logprob_rows, samples.logprobs.read(samples.wanted), strict=True))
        return StepResult(flight.number, row_results(flight.rows, tokens, finite, logprobs, flight.prompts))

    def _init_slots(self, plan: StepPlan) -> None:
        slots: list[int] = []
        tokens: list[int] = []
        for init in plan.inits:
            self._sampler.init(init)
            if init.last_token is not None:
                slots.append(init.slot)
                tokens.append(init.last_token)
        if slots:
            upload = Upload()
            upload.add(np.array(slots, np.int64))
            upload.add(np.array(tokens, np.int32))
            self._last_token.index_copy_(0, *upload.send(self._device))

    # --- decode steps, by graph -------------------------------------------------------------------------

    def _launch_graph(self, graphs: DecodeGraphs, rows: Sequence[PlanRow], flight: CudaFlight) -> None:
        changes = self._tables.changes(rows)
        if changes is not None:
            upload = Upload()
            for array in changes:
                upload.add(array)
            self._tables.write(*upload.send(self._device))
        slots = np.array([row.slot for row in rows])
        positions = np.array([row.start for row in rows])
        simple = self._sampler.simple(slots, positions + 1)
        inputs = graphs.run(slots, positions, simple)
        if simple is not None:
            flight.result = to_host(inputs.result)
        else:
            self._sample(inputs.logits, slots, positions + 1, flight)

    def _decode(self, inputs: Inputs) -> None:
        """A decode step up to its logits; captured."""
        table = self._tables.table.index_select(0, inputs.slots)
        paged = PagedRows(table, inputs.positions + 1)
        self._singles.plan(paged)

        def attend(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            self._singles.attend(layer, q, out, paged)

        tokens = self._last_token.index_select(0, inputs.slots)
        hidden = self._decoder.forward(tokens, inputs.positions, inputs.slots, attend, decode=True)
        self._decoder.project(self._model.weights.head, hidden, inputs.logits)

    def _sample_plain(self, inputs: Inputs) -> None:
        """Sampling behind it, where it takes no more than a temperature; captured."""
        self._choose(
            inputs.logits, inputs.temperatures, inputs.keys, inputs.slots, self._last_token, inputs.result
        )

    # --- all other steps --------------------------------------------------------------------------------

    def _launch_eager(self, rows: Sequence[PlanRow], flight: CudaFlight) -> None:
        # Rows of one token first, then chunks.
        order = sorted(range(len(rows)), key=lambda i: rows[i].count > 1)
        ordered = [rows[i] for i in order]
        counts = np.array([row.count for row in ordered])
        ends = np.cumsum(counts)
        single = int((counts == 1).sum())
        sampled = [(rows[i], end - 1) for i, end in sorted(zip(order, ends.tolist(), strict=True))]
        slots = np.array([slot for row, _ in sampled for slot in row.sample], np.int64)
        targets = np.array([row.start + row.count for row, _ in sampled for _ in row.sample], np.int64)
        last = np.array([at for row, at in sampled for _ in row.sample], np.int32)
        simple = self._sampler.simple(slots, targets) if slots.size else None
        temperatures, keys = simple or (np.zeros(0, np.float32), np.zeros(0, np.int64))
        changes = self._tables.changes(ordered) or (np.zeros(0, np.int64), np.zeros(0, np.int32))

        upload = Upload()
        for array in (
            np.array([t for row in ordered for t in (row.tokens or (-1,))], np.int32),
            np.concatenate([np.arange(row.start, row.start + row.count, dtype=np.int32) for row in ordered]),
            np.repeat(np.array([row.slot for row in ordered], np.int32), counts),
            np.array([row.slot for row in ordered], np.int32),
            np.array([row.start + row.count for row in ordered], np.int32),
            np.concatenate(([0], np.cumsum(counts[single:]))).astype(np.int32),
            last,
            slots.astype(np.int32),
            temperatures,
            keys,
            *changes,
        ):
            upload.add(array)
        (
            ids,
            positions,
            token_slots,
            row_slots,
            lengths,
            starts,
            last_there,
            slots_there,
            temperatures_there,
            keys_there,
            *table_changes,
        ) = upload.send(self._device)
        if changes[0].size:
            self._tables.write(*table_changes)
        longest = max(row.start + row.count for row in ordered)
        width = -(-longest // self._pool.layout.page_size)
        table = self._tables.table[:, :width].index_select(0, row_slots)
        singles = PagedRows(table[:single], lengths[:single]) if single else None
        chunks = None
        if singles is not None:
            self._singles.plan(singles)
        if single < len(ordered):
            chunks = PagedRows(table[single:], lengths[single:], starts, int(counts.max()))
            self._chunks.plan(chunks)

        def attend(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            if singles is not None:
                self._singles.attend(layer, q[:single], out[:single], singles)
            if chunks is not None:
                self._chunks.attend(layer, q[single:], out[single:], chunks)

        tokens = torch.where(ids < 0, self._last_token.index_select(0, token_slots), ids)
        whole = any(row.prompt_logprobs for row in rows)
        hidden = self._decoder.forward(
            tokens,
            positions,
            token_slots,
            attend,
            wanted=None if whole else last_there,
            decode=single == len(ordered),
        )
        if slots.size:
            last_hidden = hidden.index_select(0, last_there) if whole else hidden
            logits = self._decoder.project(self._model.weights.head, last_hidden)
            if simple is not None:
                result = torch.empty(len(slots), 2, dtype=torch.int32, device=self._device)
                self._choose(logits, temperatures_there, keys_there, slots_there, self._last_token, result)
                flight.result = to_host(result)
            else:
                self._sample(logits, slots, targets, flight)
        for i, end in zip(order, ends.tolist(), strict=True):
            if rows[i].prompt_logprobs:
                flight.prompts[i] = self._prompt_logprobs(rows[i], hidden[end - rows[i].count : end])

    # --- what takes more than a temperature -------------------------------------------------------------

    def _sample(self, logits: torch.Tensor, slots: Ints, positions: Ints, flight: CudaFlight) -> None:
        result, samples = self._sampler.sample(logits, slots, positions, self._last_token)
        flight.result = to_host(result)
        if samples.logprobs is not None:
            samples.logprobs = _logprobs_to_host(samples.logprobs)
            flight.samples = samples

    def _prompt_logprobs(self, row: PlanRow, hidden: torch.Tensor) -> list[TokenLogprobs]:
        assert row.prompt_logprobs is not None
        targets = to_device(np.array(row.prompt_logprobs, np.int64), self._device)
        parts = zip(
            torch.split(hidden[: len(targets)], _LOGITS_ROWS), torch.split(targets, _LOGITS_ROWS), strict=True
        )
        head, project = self._model.weights.head, self._decoder.project
        return [
            _logprobs_to_host(token_logprobs(project(head, states).float(), wanted, row.prompt_top))
            for states, wanted in parts
        ]


def _is_decode(rows: Sequence[PlanRow]) -> bool:
    """Whether each row goes on from its slot's last token and samples the next one for it."""
    return all(row.tokens is None and row.sample == (row.slot,) for row in rows)


def _logprobs_to_host(logprobs: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        to_host(logprobs.tokens),
        to_host(logprobs.chosen),
        to_host(logprobs.top_tokens),
        to_host(logprobs.top),
    )
