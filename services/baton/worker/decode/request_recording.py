"""What a decode node's recorder gets of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.handoff.messages import AttemptName
from baton.tracing.recorder import EventKind, Recorder
from baton.worker.decode.types import PHASES, DecodeRequest, Key, Peer


@dataclass(frozen=True, slots=True)
class RequestRecording:
    recorder: Recorder
    unfinished: Mapping[Key, DecodeRequest]
    peers: Mapping[str, Peer]
    page_bytes: int

    def add(
        self,
        state: DecodeRequest,
        kind: EventKind,
        number: int = 0,
        text: str = "",
        step: int = 0,
        size: int = 0,
    ) -> None:
        """Some events begin a phase of the request."""
        if kind in PHASES:
            state.enter(PHASES[kind], self.recorder.clock())
        name = (state.gateway, state.key.request, state.attempt)
        self.recorder.add(kind, *name, number=number, size=size, step=step, text=text)

    def tokens(self, state: DecodeRequest) -> None:
        """It has so many by now."""
        self.add(state, EventKind.TOKENS, state.output_tokens, size=state.request.accepted_drafts)

    def ended(self, state: DecodeRequest, text: str) -> None:
        self.add(state, EventKind.ENDED, state.output_tokens, text, size=state.request.accepted_drafts)

    def sent(self, name: AttemptName, address: str) -> None:
        """The prompt, to a prefill node."""
        self.recorder.add(EventKind.SENT, *name, text=address)

    def pulled(
        self, kind: EventKind, name: AttemptName, address: str, pages: int, step: int, error: str | None
    ) -> None:
        """Records that a pull of the hand-off has begun or ended."""
        text, size = address, 0
        if kind is EventKind.PULL_ENDED:
            peer = self.peers.get(address)
            text = f"failed: {error}" if error is not None else peer.transport if peer is not None else ""
            size = pages * self.page_bytes if error is None else 0
        self.recorder.add(kind, *name, pages, size, step, text)
