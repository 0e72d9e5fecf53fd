"""Names of attempts (design rule 2), and the plain messages between the two sides of a hand-off and their
shells, which send them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from baton.engine.image_spans import ImageSpan
from baton.engine.plan import Logprobs
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.kvcache.host_tier import IN_POOL, CachedTiers

if TYPE_CHECKING:
    import torch


class AttemptName(NamedTuple):
    """Name of one try at a request; late or foreign messages have another name."""

    gateway: int
    """The incarnation of the caller at the decode node."""
    request: int
    attempt: int
    decode_try: int

    def __str__(self) -> str:
        return f"{self.gateway:016x}/{self.request}/{self.attempt}/{self.decode_try}"


class RecentNames:
    """The last names that ended here: messages that were under way at that time are expected and need no
    answer."""

    def __init__(self, limit: int = 8192) -> None:
        self._limit = limit
        self._names: OrderedDict[AttemptName, None] = OrderedDict()

    def add(self, name: AttemptName) -> None:
        self._names[name] = None
        while len(self._names) > self._limit:
            self._names.popitem(last=False)

    def __contains__(self, name: AttemptName) -> bool:
        return name in self._names


REMEMBERED_TRIES = 16384
"""Attempts whose tries are counted on. More than a prefill node remembers of one stream."""


class HandoffNames:
    """Counts the tries of each attempt, so that no two hand-offs of a decode node have the same name."""

    def __init__(self) -> None:
        self._tries: OrderedDict[tuple[int, int, int], int] = OrderedDict()

    def next(
        self, gateway: int, request: int, attempt: int, in_use: Callable[[AttemptName], bool]
    ) -> AttemptName:
        """A request number is unique only on its caller's stream, and a caller may have several streams. So
        tries are counted over all streams of an incarnation. `in_use`: whether a hand-off has the name."""
        key = (gateway, request, attempt)
        number = self._tries.pop(key, 0)
        while in_use(AttemptName(*key, number)):
            number += 1
        self._tries[key] = number + 1
        while len(self._tries) > REMEMBERED_TRIES:
            self._tries.popitem(last=False)
        return AttemptName(*key, number)


@dataclass(frozen=True, slots=True)
class Peer:
    """Last known state of a worker whose pages this one pulls."""

    up: bool
    since: float
    transport: str = ""
    shares_gpu: bool = False
    """Whether it runs on this node's GPU."""
    grammars: bool = False
    """Whether it can constrain output."""
    images: bool = False
    """Whether it computes prompts with images."""
    drafts: bool = False
    """Whether it lends pages of the drafter that this worker has."""
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A worker that is believed to hold the first `tokens` tokens of a prompt."""

    address: str
    incarnation: int
    tokens: int


# --- from the side that wants pages to its shell ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPrefill:
    address: str
    name: AttemptName
    request: EngineRequest
    params: SamplingParams
    """The request's parameters, with the seed of the first choice to sample."""
    token_ids: tuple[int, ...]
    """Prompt and delivered output."""
    delivered: int
    n: int
    remaining: float
    """Seconds."""
    sources: tuple[PromptSource, ...] = ()


@dataclass(frozen=True, slots=True)
class AskCached:
    """Asks for the pages of the prompt's longest beginning that the worker's prefix tree holds."""

    address: str
    name: AttemptName
    token_ids: tuple[int, ...]
    namespace: str
    images: tuple[ImageSpan, ...] = ()
    """The last may reach beyond the tokens."""


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    address: str
    name: AttemptName


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    address: str
    name: AttemptName
    awaited: bool = True
    """Whether the request waits for the answer."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Keep this caller's leases alive."""

    address: str


@dataclass(frozen=True, slots=True)
class StartPull:
    """Once the peer's `step` has retired (0: it has), copy pages (source in the peer's pool, destination
    here), then read the sources' generations."""

    address: str
    pull: int
    pairs: tuple[tuple[int, int], ...]
    step: int = 0
    drafts: bool = False
    """The pools are the drafters'; pulls of theirs are numbered by themselves."""


@dataclass(frozen=True, slots=True)
class StopPull:
    """The pull is no longer wanted: it ends early; if it waits for its step, at once. Its end is reported
    as usual."""

    address: str
    pull: int
    drafts: bool = False


FetchEffect = StartPrefill | AskCached | CancelPrefill | ReleaseLease | Beat | StartPull | StopPull

# --- from the side that lends pages to its shell, for the holder of the attempt ---------------------------


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Consecutive pages of a KV group's page table; there may be none."""

    first: int
    """Page index of the first."""
    pages: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkAnnounced:
    name: AttemptName
    groups: tuple[GroupPages, ...]
    """One a KV group."""
    last: bool
    step: int = 0
    """The pages are final once this step has retired; 0: they are final now."""
    content: bytes = b""
    """For lent pages of a prefix tree: kvcache.kv_events.content_digest of what it says that they hold."""


@dataclass(frozen=True, slots=True)
class FirstSampled:
    name: AttemptName
    tokens: tuple[tuple[int, Logprobs | None], ...]
    cached_tokens: int
    prompt_logprobs: tuple[Logprobs, ...]
    hidden: torch.Tensor | None = None
    """[tokens, values]: as EngineRequest.hidden."""
    tiers: CachedTiers = IN_POOL


@dataclass(frozen=True, slots=True)
class DraftsAnnounced:
    """Pages of a drafter's pool, final and under the attempt's lease."""

    name: AttemptName
    groups: tuple[GroupPages, ...]
    """One a KV group of the drafter's; empty: there is nothing."""
    entries: int
    """See PagedDrafter.lend."""


@dataclass(frozen=True, slots=True)
class LeaseFinished:
    """Terminal."""

    name: AttemptName
    stood: bool


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Terminal. `code` is the name of a gRPC status code."""

    name: AttemptName
    code: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Alive:
    """The step thread has received a heartbeat. Belongs to no attempt."""


PrefillOutput = ChunkAnnounced | FirstSampled | DraftsAnnounced | LeaseFinished | PrefillFailed
"""Outputs for the holder of an attempt."""
