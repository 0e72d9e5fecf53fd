"""What a worker's core and its shell ask of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.engine.image_spans import ImageContent, ImageSpan
from baton.engine.request import EngineRequest
from baton.engine.scheduler import Scheduler
from baton.engine.step_loop import Core
from baton.engine.step_stats import StepStats
from baton.handoff.messages import FetchEffect
from baton.worker.sources.sharing import CacheSharing, SharingShell


@dataclass(frozen=True, slots=True)
class NoImages:
    """Contents of images have not come. `code` is the name of a gRPC status code."""

    code: str
    reason: str
    message: str


FetchedImages = Mapping[bytes, ImageContent] | NoImages
"""Contents by digest, or why there are none."""
Outputs = TypeVar("Outputs", contravariant=True)
"""What a role's core has to say to its callers."""


class WorkerCore(Core, Protocol):
    """What the shell needs of a core besides the step loop's interface."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def sharing(self) -> CacheSharing: ...

    @property
    def requests(self) -> int: ...

    @property
    def step_stats(self) -> StepStats: ...

    def hand_back(self) -> None:
        """Fails all unfinished requests with UNAVAILABLE (DRAINING), so that they go on elsewhere."""

    def page_uses(self) -> bytearray:
        """A kvcache.page_map.PageUse for each page of the pool."""

    def images_fetched(self, request: EngineRequest, outcome: FetchedImages) -> None:
        """The answer to `want_images`. The request may have ended meanwhile."""

    def node_failed(self, message: str) -> None:
        """Sends callers the failures of requests that may have ended the process."""


class CoreShell(SharingShell, Protocol[Outputs]):
    """What a core asks of its shell. Called in the step thread; must not block."""

    def send(self, step: int, outputs: Outputs, effects: Sequence[FetchEffect]) -> None:
        """Sends outputs to callers and performs effects. `step`: the one that they are of; 0: of none."""

    def retire(self, step: int) -> None:
        """Tells receivers that see this node's memory of a retired step."""

    def want_images(self, request: EngineRequest, images: tuple[ImageSpan, ...]) -> None:
        """Fetches contents of images that the request lacks, and calls `images_fetched`."""

    def observe(self) -> None:
        """Called after each flush."""


def is_quiet(core: WorkerCore) -> bool:
    """Whether nothing is under way that another core of this engine would not know: no request, no step in
    flight, no lease, no copy between the pool and another one."""
    scheduler, sharing = core.scheduler, core.sharing
    counts = scheduler.cache.counts()
    held = (len(scheduler.requests), scheduler.slots.in_use, scheduler.reservations.total)
    lent = len(sharing.lender.leases.running)
    return not any((*held, lent, counts.owned, counts.quarantined, scheduler.cache.locks))
