"""The engine in this process: scheduler and runner, without gRPC or other processes."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.bench.workload import Job
from baton.config import WorkerConfig
from baton.engine.draft.base import Drafter
from baton.engine.draft.length import DraftLengths
from baton.engine.model_runner import ModelRunner
from baton.engine.request import EngineRequest, FailedEvent, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_builder import Step
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.model_path import resolve
from baton.rpc.address import new_incarnation
from baton.rpc.errors import internal
from baton.worker.engine import build_engine
from baton.worker.memory import keep_freed_memory
from baton.worker.model import device_of

PROGRESS_SECONDS = 1.0
EngineProgress = Callable[[int], None]
"""Called about once a second with the number of tokens so far."""
HOST_PARTS = ("plan", "launch", "read", "commit")


@dataclass(slots=True)
class EngineRun:
    """A run of requests that are submitted at once."""

    seconds: float = 0.0
    tokens: int = 0
    first_tokens_seconds: float = 0.0
    """Until every request had its first token."""
    step_seconds: list[float] = field(default_factory=list)
    """Between the ends of successive decode steps with all requests."""
    step_tokens: int = 0
    """That these steps delivered, in all."""
    attended: float = 0.0
    """Mean number of tokens whose KV such a step reads, over all rows."""
    host: dict[str, float] = field(default_factory=dict)
    """Median host seconds of each part of such a step. On a CPU `launch` computes. `read` is missing where it
    cannot be separated from waiting for the device."""

    @property
    def tpot(self) -> float | None:
        """Median seconds of a decode step with all requests; None if there was none."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


class EngineBench:
    """An engine as a decode node builds it."""

    def __init__(self, config: WorkerConfig) -> None:
        """Loads the model; blocks. Raises BatonError."""
        started = time.monotonic()
        if device_of(config.device).type == "cpu":
            keep_freed_memory()
        self.engine = build_engine(config, new_incarnation())
        self.start_seconds = time.monotonic() - started
        self.config = self.engine.config
        self.path = resolve(config.model)
        info = self.engine.model_info
        self.context = int(info.context_length)
        self.vocabulary = int(info.vocab_size)

    def close(self) -> None:
        gc.unfreeze()
        self.engine.close()

    def facts(self) -> dict[str, Any]:
        """The engine's entry in a report."""
        info, layout = self.engine.model_info, self.engine.pool.layout
        found: dict[str, Any] = {
            "model": info.name,
            "architecture": info.architecture,
            "parameters": info.parameters,
            "dtype": info.dtype,
            "load_format": self.config.load_format,
            "quantization": self.config.quantization,
            "kv_dtype": str(layout.dtype).removeprefix("torch."),
            "device": str(self.engine.device),
            "attention": self.engine.attention,
            "overlap": self.engine.overlap,
            "page_size": layout.page_size,
            "kv_tokens": self.engine.pool.num_pages // len(layout.groups) * layout.page_size,
            "kv_bytes_per_token": layout.bytes_per_token,
            "max_rows": self.config.max_rows,
            "token_budget": self.config.token_budget,
            "start_seconds": self.start_seconds,
        }
        runner = self.engine.runner
        if isinstance(runner, ModelRunner) and runner.kernels:
            graphs = [each for each in (runner.graphs, runner.chunk_graphs) if each is not None]
            found["graphs_seconds"] = sum(each.seconds for each in graphs)
            found["graphs_mib"] = sum(each.bytes for each in graphs) / 2**20
        return found

    def run(
        self,
        jobs: Sequence[Job],
        temperature: float = 0.0,
        progress: EngineProgress = lambda tokens: None,
        drafter: Drafter | None = None,
        draft_tokens: int = 0,
        lengths: DraftLengths | None = None,
    ) -> EngineRun:
        """Runs all jobs at once on an empty cache. `lengths`: each step chooses how many drafts rows have and
        learns; None: as many as there are. Raises BatonError if one fails."""
        scheduler = self._scheduler(jobs, temperature, drafter, draft_tokens, lengths)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        gc.collect()
        gc.freeze()
        timer = _StepTimer(len(jobs), progress)
        runner, overlap = self.engine.runner, self.engine.overlap
        pending: tuple[Step, Any] | None = None
        ended, begun = 0.0, dict[int, float]()
        while scheduler.requests:
            t0 = timer.clock()
            step = scheduler.plan()
            t1 = timer.clock()
            launched = (step, runner.launch(step.plan)) if step is not None else None
            t2 = timer.clock()
            if step is not None:
                begun[step.plan.number] = t1
            if not overlap:
                pending, launched = launched, None
            if pending is not None:
                done, launched_step = pending
                event = getattr(launched_step, "done", None)
                if event is not None:
                    event.synchronize()
                t3 = timer.clock()
                result = runner.read(launched_step)
                t4 = timer.clock()
                scheduler.commit(done, result, t4 - max(ended, begun.pop(done.plan.number)))
                ended = t4
                events = scheduler.take_events()
                t5 = timer.clock()
                read = t4 - t3 if event is not None or not overlap else None
                timer.note(done, step, events, (t1 - t0, t2 - t1, read, t5 - t4))
            pending = launched
        return timer.end()

    def _scheduler(
        self,
        jobs: Sequence[Job],
        temperature: float,
        drafter: Drafter | None,
        draft_tokens: int,
        lengths: DraftLengths | None,
    ) -> Scheduler:
        pages, layout = PageAllocator(self.engine.pool.num_pages), self.engine.pool.layout
        cache = KvCacheManager(pages, PrefixTree(layout.page_size, groups=layout.groups))
        config = SchedulerConfig(
            context_length=self.context,
            token_budget=self.config.token_budget,
            max_rows=self.config.max_rows,
            max_waiting=len(jobs),
            draft_tokens=draft_tokens,
            draft_adaptive=lengths is not None,
            draft_padding=self.engine.device.type != "cpu",
        )
        scheduler = Scheduler(cache, config, drafter=drafter)
        if lengths is not None and scheduler.drafts is not None:
            scheduler.drafts.lengths, lengths.until = lengths, 0  # its steps are counted anew
        for key, job in enumerate(jobs):
            params = SamplingParams(temperature=temperature, max_tokens=job.output_tokens, seed=job.seed)
            scheduler.submit(EngineRequest(key, tuple(job.prompt), params))
        return scheduler


class _StepTimer:
    """Records the step times of a run."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, requests: int, progress: EngineProgress) -> None:
        self._requests = requests
        self._progress = progress
        self._begun: set[Any] = set()
        self._ends: list[tuple[float, int, int]] = []
        """End of each step; tokens attended to if it is a decode step of all requests, else 0; tokens that it
        delivered."""
        self._host: list[tuple[float | None, ...]] = []
        self._run = EngineRun()
        self._started = self._reported = self.clock()

    def note(
        self, done: Step, launched: Step | None, events: Sequence[Any], host: tuple[float | None, ...]
    ) -> None:
        """Records step `done`, which has been read; `launched` was launched in the same iteration."""
        now, before = self.clock(), self._run.tokens
        for event in events:
            if isinstance(event, TokenEvent):
                self._run.tokens += 1
                self._begun.add(event.sequence.request.key)
            elif isinstance(event, FailedEvent):
                raise internal(f"a request failed: {event.message}", event.reason)
        if not self._run.first_tokens_seconds and len(self._begun) == self._requests:
            self._run.first_tokens_seconds = now - self._started
        rows = done.plan.rows
        decode = all(row.tokens is None for row in rows)
        whole = decode and len(rows) == self._requests
        attended = sum(row.start + 1 for row in rows) if whole else 0
        self._ends.append((now, attended, self._run.tokens - before))
        if decode and launched is not None and len(launched.plan.rows) == len(rows):
            self._host.append(host)
        if now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            self._progress(self._run.tokens)

    def end(self) -> EngineRun:
        run = self._run
        run.seconds = self.clock() - self._started
        pairs = [(a, b) for a, b in itertools.pairwise(self._ends) if a[1] and b[1]]
        run.step_seconds = [b[0] - a[0] for a, b in pairs]
        run.step_tokens = sum(b[2] for _, b in pairs)
        run.attended = statistics.fmean(b[1] for _, b in pairs) if pairs else 0.0
        for name, values in zip(HOST_PARTS, zip(*self._host, strict=True), strict=bool(self._host)):
            known = [value for value in values if value is not None]
            if known:
                run.host[name] = statistics.median(known)
        return run
