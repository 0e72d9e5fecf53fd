"""Executes step plans: the model, its KV pool, attention and sampling on one device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from baton.attention.base import AttentionBackend, AttentionRow
from baton.engine.grammar_masks import Masks, MaskStats
from baton.engine.plan import Logprobs, PlanRow, Pooling, RowResult, StepPlan, StepResult
from baton.engine.sampler import BAD_LOGITS, Sampler, Samples, TokenLogprobs, row_results, token_logprobs
from baton.kvcache.kv_groups import places
from baton.kvcache.kv_pool import PagePool
from baton.layers.forward_batch import ForwardBatch
from baton.models.decoder import LanguageModel

_LOGITS_ROWS = 64
"""Prompt log-probabilities are computed for this many positions at a time, to bound their memory."""


@dataclass(slots=True)
class LaunchedStep:
    """A launched step: its results, and the rows they belong to."""

    number: int
    rows: tuple[PlanRow, ...]
    samples: Samples | None
    """Samples of all sampling rows' slots, in the order of the plan."""
    prompts: dict[int, list[TokenLogprobs]]
    """Prompt log-probabilities, by the row's place in the plan."""
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)
    """float32 [hidden], of the rows with PlanRow.pooling, by their place in the plan."""
    event: torch.cuda.Event | None = None
    """On a GPU: that the step has been computed."""


class ModelRunner:
    """Implements `engine.plan.Runner`. Rows of one token use the decode backend, others the prefill one."""

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        *,
        max_slots: int,
        prefill_attention: type[AttentionBackend],
        decode_attention: type[AttentionBackend],
        device: torch.device | str | None = None,
    ) -> None:
        self.max_slots = max_slots
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._pool = pool
        self._device = torch.device(device) if device is not None else model.device
        heads, options = model.heads, model.attention_options
        self._groups = pool.layout.groups
        self._places = places(self._groups)
        of_groups = [[options[layer] for layer in group.layers] for group in self._groups]
        views = list(zip(pool.groups, of_groups, strict=True))
        self._prefill = [prefill_attention(view, heads, own) for view, own in views]
        self._decode = [decode_attention(view, heads, own) for view, own in views]
        self._communicator = model.communicator
        shared = pool.heads != (0, pool.layout.num_kv_heads) or pool.layout.layouts[0].parts == 1
        self._pool_shared = shared and self._communicator is not None and pool.device.type == "cpu"
        self._sampler = Sampler(max_slots, self.vocab_size, self._device) if model.shard.rank == 0 else None
        """Only rank 0 samples and has results."""
        self._last_token = torch.zeros(max_slots, dtype=torch.int64, device=self._device)

    @property
    def mask_stats(self) -> MaskStats:
        return MaskStats() if self._sampler is None else self._sampler.grammars.stats

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueues the step; on a CPU, computes it."""
        if plan.copies:
            self._copy(plan.copies)
        for init in plan.inits:
            if self._sampler is not None:
                self._sampler.init(init)
            if init.last_token is not None:
                self._last_token[init.slot] = init.last_token
        if not plan.rows:
            return LaunchedStep(plan.number, (), None, {}, event=self._recorded())
        # Rows of one token first, so that each backend sees consecutive tokens.
        order = sorted(range(len(plan.rows)), key=lambda i: plan.rows[i].count > 1)
        rows = [plan.rows[i] for i in order]
        # Masks are computed while the forward pass runs.
        masks = None
        if self._sampler is not None:
            masks = self._sampler.begin_masks([slot for row in plan.rows for slot in row.sample])
        hidden, ends = self._forward(rows)
        samples = self._sample(plan.rows, hidden, dict(zip(order, ends, strict=True)), masks)
        prompts = {
            i: self._prompt_logprobs(row, hidden[end - row.count : end])
            for i, row, end in zip(order, rows, ends, strict=True)
            if row.prompt_logprobs
        }
        pooled = {
            i: pool_states(row.pooling, hidden[end - row.count : end])
            for i, row, end in zip(order, rows, ends, strict=True)
            if row.pooling is not None and self._sampler is not None
        }
        return LaunchedStep(plan.number, plan.rows, samples, prompts, pooled, self._recorded())

    def hidden_states(self, row: PlanRow) -> torch.Tensor:
        """Computes one row of tokens: final hidden states [tokens, hidden]."""
        return self._forward([row])[0]

    def _recorded(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages. If several ranks hold the same heads in one pool, the first copies and the others
        wait for it."""
        if not self._pool_shared or self._model.shard.keeps(self._model.caches[0].heads):
            for source, destination in pairs:
                self._pool.copy_page(source, destination)
        if self._communicator is not None:
            self._communicator.all_reduce(torch.zeros(1, device=self._device))

    def _forward(self, rows: Sequence[PlanRow]) -> tuple[torch.Tensor, list[int]]:
        """Final hidden states of all tokens [tokens, hidden], and where each row's end."""
        tokens: list[int] = []
        positions: list[int] = []
        from_slots: list[int] = []
        at: list[int] = []
        ends: list[int] = []
        single = 0
        for row in rows:
            if row.tokens is None:
                at.append(len(tokens))
                from_slots.append(row.slot)
                tokens.append(0)
                positions.append(row.start)
            else:
                tokens += row.tokens
                positions += range(row.start, row.start + len(row.tokens))
            single += row.count == 1
            ends.append(len(tokens))
        ids = torch.tensor(tokens, device=self._device)
        if at:
            ids[torch.tensor(at, device=self._device)] = self._last_token[
                torch.tensor(from_slots, device=self._device)
            ]
        for index, (decode, prefill) in enumerate(zip(self._decode, self._prefill, strict=True)):
            meta = [self._attention_row(row, index) for row in rows]
            if single:
                decode.prepare(meta[:single])
            if single < len(rows):
                prefill.prepare(meta[single:])

        options, places = self._model.attention_options, self._places

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            latent = options[layer].latent
            out = q.new_empty(*q.shape[:2], q.shape[2] if latent is None else latent.value_dim)
            group, place = places[layer]
            if single:
                self._decode[group].forward(place, q[:single], k[:single], v[:single], out[:single])
            if single < len(rows):
                self._prefill[group].forward(place, q[single:], k[single:], v[single:], out[single:])
            return out.flatten(1)

        batch = ForwardBatch(ids, torch.tensor(positions, device=self._device), attend)
        return self._model.forward(batch), ends

    def _attention_row(self, row: PlanRow, group: int) -> AttentionRow:
        """What the row sees of a group, from the first page on."""
        size = self._pool.layout.page_size
        first = self._groups[group].spec.sees(row.start, size)
        table = row.tables[group]
        return AttentionRow(row.start - first * size, row.count, table[first:] if first else table)

    def _sample(
        self,
        rows: Sequence[PlanRow],
        hidden: torch.Tensor,
        ends: dict[int, int],
        masks: Future[Masks] | None,
    ) -> Samples | None:
        slots: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for i, row in enumerate(rows):
            slots += row.sample
            positions += [row.start + row.count] * len(row.sample)
            last += [ends[i] - 1] * len(row.sample)
        if not slots:
            return None
        logits = self._model.logits(hidden[torch.tensor(last, device=self._device)])
        samples = None
        if self._sampler is not None:
            samples = self._sampler.sample(logits, np.array(slots), np.array(positions), masks)
        tokens = self._last_token.new_empty(len(slots)) if samples is None else samples.tokens
        if self._communicator is not None:
            self._communicator.broadcast(tokens)
        self._last_token[torch.tensor(slots, device=self._device)] = tokens
        return samples

    def _prompt_logprobs(self, row: PlanRow, hidden: torch.Tensor) -> list[TokenLogprobs]:
        assert row.prompt_logprobs is not None
        targets = torch.tensor(row.prompt_logprobs, device=self._device)
        found = []
        for states, wanted in zip(
            torch.split(hidden[: len(targets)], _LOGITS_ROWS),
            torch.split(targets, _LOGITS_ROWS),
            strict=True,
        ):
            logits = self._model.logits(states)
            if self._sampler is not None:
                found.append(token_logprobs(logits, wanted, row.prompt_top))
        return found

    def done(self, flight: LaunchedStep) -> bool:
        return flight.event is None or bool(flight.event.query())  # type: ignore[no-untyped-call]

    def read(self, flight: LaunchedStep) -> StepResult:
        """Waits for the step and copies its tokens to the host."""
        if flight.event is not None:
            flight.event.synchronize()
        samples = flight.samples
        tokens: list[int] = [] if samples is None else samples.tokens.tolist()
        if self._communicator is not None:
            self._communicator.check()
        finite: list[bool] = [] if samples is None else samples.peaks.isfinite().tolist()
        logprobs: dict[int, Logprobs] = {}
        if samples is not None and samples.logprobs is not None:
            logprobs = dict(zip(samples.logprob_rows, samples.logprobs.read(samples.wanted), strict=True))
        errors = {} if samples is None else samples.errors
        rows = row_results(flight.rows, tokens, finite, logprobs, flight.prompts, errors)
        add_pooled(rows, flight.pooled)
        return StepResult(flight.number, rows)


def add_pooled(rows: Sequence[RowResult], pooled: dict[int, torch.Tensor]) -> None:
    """Adds what was pooled, float32 [hidden] by the rows' places, to their results."""
    for i, state in pooled.items():
        vector = rows[i].pooled = state.cpu().numpy()
        if not np.isfinite(vector).all():
            rows[i].error = BAD_LOGITS


def pool_states(pooling: Pooling, states: torch.Tensor) -> torch.Tensor:
    """states: final hidden states of a row [tokens, hidden], which the result does not keep in memory."""
    return states[-1].to(torch.float32, copy=True) if pooling is Pooling.LAST else states.float().sum(0)
