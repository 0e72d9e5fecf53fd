"""What prefill and decode nodes do with messages, whatever executes them: a process or a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from baton.config import WorkerConfig
from baton.engine.image_spans import ImageSpan
from baton.engine.request import EngineRequest
from baton.engine.scheduler_config import SchedulerConfig
from baton.grammar.base import CompiledGrammar, GrammarError, GrammarSpec
from baton.handoff.messages import AttemptName, FetchEffect
from baton.kvcache import KvCacheManager
from baton.rpc.errors import BatonError, unavailable
from baton.tracing.recorder import Recorder
from baton.transport import Receiver
from baton.v1 import common_pb2, node_pb2, prefill_pb2
from baton.worker.core import WorkerCore

if TYPE_CHECKING:
    from baton.worker.hidden_states import HiddenForm
    from baton.worker.peers import PageLink, PagePeer
    from baton.worker.sources.sharing import LeaseOutputs
    from baton.worker.sources.shell import CacheLending, SourcePeers

LOST_SECONDS = 1.0
"""How long the step thread of rank 0 has to notice by itself that another rank has ended."""


C = TypeVar("C", bound=WorkerCore)


class Steps(Protocol[C]):  # type: ignore[misc]  # a core's own type, neither wider nor narrower
    """The step thread: engine.step_loop.StepLoop, or sim.driver.StepDriver in virtual time."""

    @property
    def step_age(self) -> float: ...

    def call(self, function: Callable[[C, float], None]) -> None: ...


class Streams(Protocol):
    """The streams of a node's callers: worker.caller_stream.CallerStreams."""

    @property
    def open(self) -> Collection[Any]: ...


class WorkerShell(Generic[C]):
    """Base class of prefill and decode nodes. `prefill.shell` and `decode.shell` add a role's messages; who
    executes a node (`worker.node`, `sim.process`, `sizing.nodes`) adds clock, threads, engine and streams."""

    config: WorkerConfig
    incarnation: int
    draining: bool
    model_info: node_pb2.ModelInfo
    layout: common_pb2.Layout
    page_bytes: int
    device: str
    """The type of the device."""
    steps: Steps[C]
    core_or_none: C | None
    """None until the engine has been built."""
    streams: Streams
    recorder: Recorder
    hidden_form: HiddenForm | None = None
    """Form of hidden states that a drafter here wants with first tokens; None: none does."""
    draft_layout: common_pb2.Layout | None = None
    """Layout of the pages of a drafter here, where they travel; None: there are none."""
    lending: CacheLending
    sources: SourcePeers

    def clock(self) -> float:
        """Monotonic seconds."""
        raise NotImplementedError

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Called in the step thread: runs the function on the event loop."""
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Any:
        """Runs the coroutine on the event loop; returns its task, which can be cancelled."""
        raise NotImplementedError

    def endpoints(self, pool: int = 0) -> list[common_pb2.Endpoint]:
        """Where peers can open this node's pool. `pool`: as FetchRequest.pool."""
        raise NotImplementedError

    async def open_receiver(
        self, endpoints: Sequence[common_pb2.Endpoint], address: str, pool: int = 0
    ) -> Receiver:
        """Opens a peer's pool, of pages for the one here of this number. Raises TransportError."""
        raise NotImplementedError

    def has_drafts_of(self, peer: prefill_pb2.PrefillHello | prefill_pb2.PrefillWelcome) -> bool:
        """Whether the peer's drafter has the same pages as the one here."""
        layout = self.draft_layout
        return layout is not None and peer.HasField("draft_layout") and peer.draft_layout == layout

    def make_core(self, cache: KvCacheManager) -> C:
        raise NotImplementedError

    def compile_grammar(
        self, spec: GrammarSpec, done: Callable[[CompiledGrammar | GrammarError], None]
    ) -> None:
        """Calls `done` on the event loop, once; at once if the outcome is known."""
        raise NotImplementedError

    def want_images(self, request: EngineRequest, images: tuple[ImageSpan, ...]) -> None:
        """See worker.core.CoreShell."""
        raise NotImplementedError

    def name_of(self, request: EngineRequest) -> AttemptName:
        """The name by which other processes know the attempt."""
        raise NotImplementedError

    def announce_drain(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True

    def hand_back(self) -> None:
        """Fails running requests with terminal events, after which their callers resume them elsewhere."""
        self.steps.call(lambda core, _: core.hand_back())

    @property
    def requests(self) -> int:
        """How many requests the node holds in any state."""
        return self.core_or_none.requests if self.core_or_none is not None else 0

    def make_source_link(self, address: str, peer: PagePeer) -> PageLink:
        """A stream of Cache.Lend, not yet started."""
        raise NotImplementedError

    def share(self, lent: LeaseOutputs, effects: Sequence[FetchEffect]) -> None:
        """Called in the step thread: sends what borrowers are told and what sources are asked."""
        self.post(self._share, lent, effects)

    def _share(self, lent: LeaseOutputs, effects: Sequence[FetchEffect]) -> None:
        self.lending.deliver(lent)
        self.sources.perform(effects)

    def retire(self, step: int) -> None:
        """Called in the step thread: tells receivers that see this node's memory of a retired step."""
        raise NotImplementedError

    def observe(self) -> None:
        """Called in the step thread after each flush."""

    def load(self) -> node_pb2.Load:
        raise NotImplementedError

    def problems(self, load: node_pb2.Load) -> Iterator[node_pb2.Problem]:
        """Current problems."""
        raise NotImplementedError

    def limits(self) -> SchedulerConfig:
        """What the engine can do; the rest of it is set by the role."""
        return SchedulerConfig(self.model_info.context_length, self.config.token_budget, self.config.max_rows)

    def require_turning(self) -> None:
        """Raises BatonError while the step thread is stuck: callers are refused then."""
        if self.stuck():
            raise self.stuck_error()

    def stuck(self, floor: float | None = None) -> bool:
        """Whether the step thread's iteration takes longer than its step may, and longer than `floor` seconds
        (None: --stuck-seconds)."""
        core = self.core_or_none
        least = self.config.stuck_seconds if floor is None else floor
        return core is not None and self.steps.step_age > core.step_stats.limit(least)

    def stuck_error(self) -> BatonError:
        text = f"the step thread has been in one step for {self.steps.step_age:.1f} s"
        return unavailable(text, "STEP_THREAD_STUCK", 1000)
