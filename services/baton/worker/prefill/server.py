"""The node of the prefill role: prefill.shell in a process."""

from __future__ import annotations

from baton.config import PrefillConfig
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.tracing.recorder import Recorder
from baton.worker.caller_stream import CallerStreams
from baton.worker.lease_stream import LeaseStream
from baton.worker.node import WorkerNode
from baton.worker.prefill.core import PrefillCore
from baton.worker.prefill.shell import PrefillShell


class PrefillNode(PrefillShell, WorkerNode[PrefillCore]):
    """One engine that computes prompts, and the callers connected to it."""

    role = "prefill"

    def __init__(self, config: PrefillConfig, recorder: Recorder | None = None) -> None:
        super().__init__(config, recorder)
        self.streams: CallerStreams[LeaseStream] = CallerStreams(self, self.tasks)

    def retire(self, step: int) -> None:
        segment = self.engine.published.segment
        if segment is not None:
            segment.retire(step)

    def make_prompt_drafter(self) -> PagedDrafter | None:
        loaded = self.engine.drafter
        return loaded.drafter if loaded is not None and isinstance(loaded.drafter, PagedDrafter) else None

    def make_stream(self, incarnation: int) -> LeaseStream:
        return LeaseStream(incarnation)
