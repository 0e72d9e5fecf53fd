"""Requests and their sequences, which the scheduler moves through its queues."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from baton.engine.draft.length import RowDrafts
from baton.engine.image_spans import ImageSource, ImageSpan
from baton.engine.plan import Logprobs, Pooling, Vector
from baton.engine.sampling_params import SamplingParams
from baton.grammar.base import CompiledGrammar
from baton.kvcache import BlockTable
from baton.kvcache.disk_tier import FileJob
from baton.kvcache.host_tier import IN_POOL, CachedTiers, TierCopy
from baton.kvcache.page_keys import is_placeholder
from baton.tracing.recorder import EventKind

if TYPE_CHECKING:
    import torch


class EngineFinishReason(Enum):
    STOP = auto()
    LENGTH = auto()


class SequencePhase(Enum):
    WAITING = auto()
    """Queued; holds neither pages nor a slot."""
    HANDOFF = auto()
    """Admitted; its prompt is computed elsewhere or being pulled."""
    PROMPT = auto()
    """Admitted; its known tokens are being computed here, chunk by chunk."""
    RUNNING = auto()
    """One row in every step."""
    LEASED = auto()
    """A prefill node's prompt that is complete; its pages are kept to be pulled."""
    ENDED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of a request: a token log, and while admitted a batch slot and pages.

    Before the prompt is complete only choice 0 (the leader) is scheduled; the others fork from it.
    Invariant: retired <= computed <= len(tokens) + unread.
    """

    request: EngineRequest
    index: int
    tokens: list[int]
    """Prompt and the output read from the device so far."""
    encoded: bytes | None = None
    """While it waits: its tokens, as the prefix tree compares them."""
    match: tuple[int, int] | None = None
    """While it waits: KvCacheManager.version, and how many of its pages were cached then."""
    diverges: int = 0
    """While its prompt is computed here: a page border up to which an earlier sequence had the same tokens. A
    chunk ends there, which leaves a snapshot of the states for the next that does."""
    promotion: TierCopy | None = None
    """While it waits: the copy of its pages from the host tier. There is one at most."""
    disk_read: FileJob | None = None
    """While it waits: what brought its pages from the disk to the host tier, before that copy."""
    phase: SequencePhase = SequencePhase.WAITING
    finish: EngineFinishReason | None = None
    slot: int | None = None
    slot_ready: bool = False
    block_table: BlockTable | None = None
    reserved: int = 0
    """Pages reserved at admission and not yet taken."""
    computed: int = 0
    """Tokens whose KV has been launched; of a row with drafts as if all were right."""
    retired: int = 0
    """Tokens whose KV is final: their step has retired."""
    unread: int = 0
    """Sampled tokens that have been launched and not yet read, at most: two with overlap, and drafts."""
    last_step: int = 0
    """The last launched step that uses its pages or its slot."""
    followers: list[Sequence] = field(default_factory=list)
    """For an admitted leader: the choices that will fork from its pages once the prompt is complete."""
    replay: int = 0
    """PlanRow.replay of its next row."""
    drafted: int = 0
    """Drafts in steps that have been launched and not yet read."""
    drafting: object = None
    """What the drafter keeps of it."""
    draft_kind: int = 0
    """Set by the drafter, if it likes, with each draft: drafts of one kind are right about equally often."""
    row_drafts: RowDrafts = field(default_factory=RowDrafts)
    epoch: int = 0
    """Counts placements; results of a step launched in an earlier one are dropped."""

    @property
    def awaits_pages(self) -> bool:
        """Whether pages of lower tiers are under way for it."""
        return any(each is not None and each.running for each in (self.promotion, self.disk_read))

    def tiers(self, rows: int, page_size: int) -> CachedTiers:
        """Where the first `rows` page indexes were, which it now finds in the prefix tree."""
        promoted = min(rows, self.promotion.kept if self.promotion is not None else 0)
        read = min(promoted, self.disk_read.read_rows if self.disk_read is not None else 0)
        borrowed = min((rows - promoted) * page_size, self.request.borrowed)
        return CachedTiers((promoted - read) * page_size, read * page_size, borrowed)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: by priority, then by arrival. The last is retracted first."""
        return (-self.request.priority, self.request.order, self.index)

    @property
    def num_output(self) -> int:
        """Output tokens, those in flight included."""
        return len(self.tokens) - len(self.request.prompt) + self.unread  # for every row of every step

    @property
    def num_read(self) -> int:
        """Output tokens that have been read."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def missing(self) -> int:
        """Known or launched tokens whose KV has not been launched."""
        return len(self.tokens) + self.unread - self.computed

    @property
    def seed(self) -> int:
        return (self.request.params.seed + self.index) % 2**64


@dataclass(eq=False, slots=True)
class EngineRequest:
    """A prompt with its parameters."""

    key: Hashable
    """The caller's name for it; opaque here."""
    prompt: tuple[int, ...]
    params: SamplingParams
    delivered: tuple[tuple[int, ...] | None, ...] = ()
    """On a resume, of each choice: the output that earlier attempts have delivered, which is never sampled
    again; None: the choice has finished. Choices are then computed separately. Empty: no resume."""
    n: int = 1
    namespace: str = ""
    priority: int = 0
    """Higher is served earlier and retracted later."""
    deadline: float = float("inf")
    """On the engine's monotonic clock, in seconds."""
    order: int = 0
    """Arrival number, given by the scheduler."""
    sequences: list[Sequence] = field(default_factory=list)
    """Empty once it has ended: see Scheduler.forget."""
    forked: bool = False
    """Every choice has its own first token."""
    reported: bool = False
    """The request's PromptEvent has been emitted; there is one, however often the prompt is computed."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix tree; None until admission."""
    tiers: CachedTiers = IN_POOL
    """Cached tokens that were not in the pool."""
    borrowed: int = 0
    """Prompt tokens whose pages came from other nodes before its admission."""
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    trace: str = ""
    """Trace context for the processes that are asked for a part of it; opaque here."""
    retractions: int = 0
    drafted_tokens: int = 0
    """Drafts of its choices that have been verified here."""
    accepted_drafts: int = 0
    """Those of them that were right."""
    grammar: CompiledGrammar | None = None
    """params.grammar, compiled; until then the request is not admitted."""
    paused: bool = False
    """The request's running sequences get no rows."""
    failed_steps: int = 0
    """Steps with it that failed, or with which their node ended. Above 0 it is suspected of being the cause:
    one suspect is admitted at a time."""
    suspect: bool = False
    """A node was lost without a word while it may have been computing the request."""
    held: bool = field(init=False)
    """A suspect whose turn has not come; when there is room for it, it asks for its turn."""
    hidden_layers: tuple[int, ...] = ()
    """Whoever decodes its outputs wants hidden states of the prompt's last tokens: HiddenTap.layers."""
    hidden: torch.Tensor | None = None
    """These [tokens, values], once the prompt is complete."""
    images: tuple[ImageSpan, ...] = ()
    """In the order of the prompt, whose tokens are placeholders (kvcache.page_keys) where they lie."""
    image_source: ImageSource | None = None
    """Where their contents are to be had."""
    awaits_images: bool = False
    """Contents that it needs to be computed here are under way."""
    pooling: Pooling | None = None
    """An embedding is wanted: the prompt is computed, and no token is sampled. None: tokens are wanted."""
    pooled: Vector | None = None
    """The sum of hidden states so far (Pooling.MEAN), or the last one."""

    def __post_init__(self) -> None:
        self.held = self.suspect
        for index, output in enumerate(self.delivered or ((),) * self.n):
            sequence = Sequence(self, index, [*self.prompt, *(output or ())])
            sequence.phase = SequencePhase.WAITING if output is not None else SequencePhase.ENDED
            self.sequences.append(sequence)

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The prompt without its images."""
        return tuple(t for t in self.prompt if not is_placeholder(t)) if self.images else self.prompt

    @property
    def awaits_grammar(self) -> bool:
        return self.grammar is None and self.params.grammar is not None

    @property
    def blocked(self) -> bool:
        """Whether it may wait for something else than room."""
        return self.held or self.awaits_grammar or self.awaits_images

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities are still to be computed."""
        return self.params.prompt_logprobs is not None and not self.reported

    @property
    def wants_all_positions(self) -> bool:
        """Whether the whole prompt is computed, whatever the prefix tree holds."""
        return self.wants_prompt_logprobs or self.pooling is Pooling.MEAN

    @property
    def ended(self) -> bool:
        return all(sequence.phase is SequencePhase.ENDED for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt is complete; comes before its first tokens."""

    request: EngineRequest


@dataclass(slots=True)
class TokenEvent:
    sequence: Sequence
    token: int
    logprobs: Logprobs | None
    finish: EngineFinishReason | None


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """A prompt chunk has retired: `sequence.retired` has grown."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """All choices have finished."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The engine could not continue the request."""

    request: EngineRequest
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class EmbeddedEvent:
    """A prompt is complete whose embedding was wanted, and has ended: `request.pooled` is final."""

    request: EngineRequest


RecordEvent = Callable[[EngineRequest, EventKind, int, int], None]
"""record(request, kind, number, step): what the recorder is to keep; baton.tracing says what it means."""


def nothing(request: EngineRequest, kind: EventKind, number: int, step: int) -> None:
    """A RecordEvent that keeps nothing."""


EngineEvent = PromptEvent | TokenEvent | ChunkEvent | FinishedEvent | FailedEvent


class Refused(Exception):
    """A request is refused. `field` names the wrong field; None: there is no room now."""

    def __init__(self, reason: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
