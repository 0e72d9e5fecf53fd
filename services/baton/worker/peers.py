"""Connections to workers whose pages this one pulls: links, opened pools, pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import grpc

from baton.handoff.fetch import HEARTBEAT_SECONDS, Fetches
from baton.handoff.messages import (
    AttemptName,
    Beat,
    CancelPrefill,
    FetchEffect,
    Peer,
    PrefillOutput,
    StartPull,
    StopPull,
)
from baton.handoff.pull_cost import PullMeter
from baton.rpc.errors import BatonError, failed_precondition, invalid, unavailable
from baton.rpc.logs import get_logger
from baton.transport import Receiver, TransportError, share_gpu
from baton.v1 import prefill_pb2
from baton.worker.convert import layout_difference
from baton.worker.handoff_messages import Positions, events_from, request_for
from baton.worker.hidden_states import layers_to
from baton.worker.shell import WorkerShell

MAX_PEERS = 256
FORGET_SECONDS = 60.0
"""A worker is forgotten this long after the last request that could name it has ended; those of the process's
own configuration are never forgotten."""

_log = get_logger()


class PageLink(Protocol):
    """A stream to a worker: rpc.link.Link."""

    @property
    def connected(self) -> bool: ...

    @property
    def last_error(self) -> BatonError | None: ...

    def start(self) -> None: ...

    def send(self, request: prefill_pb2.PrefillRequest) -> bool: ...

    def reset(self, error: BatonError) -> None: ...

    async def close(self) -> None: ...


class PageTaker(Protocol):
    """The part of a core that wants the pages."""

    @property
    def fetches(self) -> Fetches[Any]: ...

    def receive(self, address: str, messages: Iterable[PrefillOutput], now: float) -> None:
        """What the worker at `address` says; nothing but that its step thread is alive, perhaps."""

    def peer_changed(self, address: str, peer: Peer, reason: str) -> None: ...

    def forget_peer(self, address: str) -> None:
        """No recent request names the worker; its connection has been closed."""


class PagePeers:
    """All workers that this one pulls pages from. Lives on the event loop."""

    def __init__(
        self,
        node: WorkerShell[Any],
        make_link: Callable[[str, PagePeer], PageLink],
        taker: Callable[[Any], PageTaker],
        *,
        configured: Sequence[str] = (),
        request_seconds: float,
        silence: float,
    ) -> None:
        """`make_link`: a stream to a worker, not yet started. `taker`: in the node's core. `configured`:
        workers that are never forgotten. `request_seconds`: how long a request may last. `silence`: seconds
        without an answer after which fetches fail."""
        self._node = node
        self._make_link = make_link
        self._taker = taker
        self._configured = frozenset(configured)
        self._forget_seconds = request_seconds + FORGET_SECONDS
        self._silence = max(silence / 2, silence - 2 * HEARTBEAT_SECONDS)
        self._peers: dict[str, PagePeer] = {}
        self._pulls: dict[tuple[bool, int], PullTask] = {}
        self.pull_meter = PullMeter()

    def check_room(self, addresses: Sequence[str]) -> None:
        """Raises BatonError when a caller names more prefill nodes than this node connects to at a time."""
        if not self.has_room(addresses):
            raise invalid("prefill", f"this node connects to at most {MAX_PEERS} prefill nodes")

    def has_room(self, addresses: Sequence[str]) -> bool:
        """Whether these may be connected to, too."""
        self._forget()
        return len(self._peers) + len(set(addresses) - self._peers.keys()) <= MAX_PEERS

    def connect(self, address: str) -> None:
        """Connects to a node that a request names, unless it is connected already."""
        if address not in self._peers:
            peer = PagePeer(self._node, self._make_link, self._taker, address, self._silence)
            self._peers[address] = peer
        self._peers[address].named = self._node.clock()

    def _forget(self) -> None:
        """Forgets nodes that no recent request has named, so that addresses of a changing fleet do not
        accumulate."""
        oldest = self._node.clock() - self._forget_seconds
        for address, peer in list(self._peers.items()):
            if peer.named < oldest and address not in self._configured:
                del self._peers[address]
                self._node.spawn(peer.close(), f"leave {address}")
                self._tell_forgotten(address)

    def _tell_forgotten(self, address: str) -> None:
        self._node.steps.call(lambda core, now: self._taker(core).forget_peer(address))

    @property
    def usable(self) -> set[str]:
        """Addresses of the nodes that prompts can be handed off to."""
        return {address for address, peer in self._peers.items() if peer.usable.is_set()}

    def perform(self, effects: Sequence[FetchEffect]) -> None:
        """Executes effects of the core. A message to a lost peer is dropped: the core learns of the loss.

        Cancels go last, so that no message about an attempt follows its cancel.
        """
        for effect in sorted(effects, key=lambda effect: isinstance(effect, CancelPrefill)):
            peer = self._peers.get(effect.address)
            if isinstance(effect, StartPull):
                pull = PullTask(effect, self._node.steps.call, self._taker)
                self._pulls[effect.drafts, effect.pull] = pull
                pull.task = self._node.spawn(self._pull(peer, pull, effect), "pull")
            elif isinstance(effect, StopPull):
                if (number := (effect.drafts, effect.pull)) in self._pulls:
                    self._pulls[number].stop()
            elif peer is not None:
                peer.send(effect)

    async def _pull(self, peer: PagePeer | None, pull: PullTask, effect: StartPull) -> None:
        try:
            await pull.run(peer.receiver_of(effect) if peer is not None else None)
        finally:
            del self._pulls[effect.drafts, effect.pull]
            if pull.seconds is not None and not effect.drafts:
                tokens = len(effect.pairs) * self._node.layout.page_size
                self.pull_meter.add(tokens, max(pull.seconds, 1e-6))

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))


class PagePeer:
    """One worker. It is usable when its pool has been opened."""

    def __init__(
        self,
        node: WorkerShell[Any],
        make_link: Callable[[str, PagePeer], PageLink],
        taker: Callable[[Any], PageTaker],
        address: str,
        silence: float,
    ) -> None:
        """silence: seconds without any answer after which the connection is reopened."""
        self.address = address
        self.receiver: Receiver | None = None
        self.draft_receiver: Receiver | None = None
        """None: its drafter, if it has one, is another."""
        self.usable = asyncio.Event()
        self.incarnation = 0
        self.named = 0.0
        """When a request last named it."""
        self._asked: float | None = None
        """Time of the first heartbeat that is still unanswered."""
        self._node = node
        self._taker = taker
        self._silence = silence
        self._session = 0
        self._parts: dict[AttemptName, Positions] = {}
        self.link = make_link(address, self)
        self.link.start()

    @property
    def trouble(self) -> str:
        error = self.link.last_error
        return error.message if error is not None else "not connected yet"

    @property
    def other_role(self) -> bool:
        """It has said that it is no prefill node any more."""
        error = self.link.last_error
        return error is not None and error.reason == "OTHER_ROLE"

    def send(self, effect: FetchEffect) -> None:
        """Every heartbeat is answered. If answers are missing, the connection may be at fault. It is closed
        shortly before the hand-offs time out, so that no prompt goes there until it is reopened."""
        if isinstance(effect, Beat):
            now = self._node.clock()
            if self._asked is None:
                self._asked = now
            elif now - self._asked > self._silence:
                text = f"{self.address} has said nothing for {self._silence:g} s"
                self.link.reset(unavailable(text, "SILENT"))
                return
        ahead = self.receiver is not None and self.receiver.sees_steps
        self.link.send(request_for(effect, ahead))

    def hello(self) -> prefill_pb2.PrefillRequest:
        hello = prefill_pb2.PrefillHello(incarnation=self._node.incarnation, layout=self._node.layout)
        if self._node.hidden_form is not None:
            hello.hidden_layers.extend(layers_to(self._node.hidden_form.layers))
        if self._node.draft_layout is not None:
            hello.draft_layout.CopyFrom(self._node.draft_layout)
        return prefill_pb2.PrefillRequest(hello=hello)

    def welcomed(self, response: prefill_pb2.PrefillResponse) -> None:
        if len(response.events) != 1 or response.events[0].WhichOneof("kind") != "welcome":
            self.link.reset(failed_precondition("the first answer was not a welcome", "PROTOCOL"))
            return
        self._asked = None
        welcome = response.events[0].welcome
        self._node.spawn(self._open(welcome, self._session), f"open pool of {self.address}")

    async def _open(self, welcome: prefill_pb2.PrefillWelcome, session: int) -> None:
        difference = layout_difference(welcome.layout, self._node.layout)
        if difference is not None:
            self.link.reset(failed_precondition(f"{self.address}: {difference}", "LAYOUT_MISMATCH"))
            return
        try:
            receiver = await self._node.open_receiver(list(welcome.endpoints), self.address)
        except TransportError as error:
            self.link.reset(failed_precondition(f"no transport to {self.address}: {error}", "NO_TRANSPORT"))
            return
        drafts = await self._open_drafts(welcome)
        if session != self._session or not self.link.connected:
            await _close(receiver, drafts)
            return
        self.receiver, self.draft_receiver = receiver, drafts
        self.incarnation = welcome.incarnation
        self.usable.set()
        if welcome.lease_grace_ms:
            grace = welcome.lease_grace_ms / 1000
            self._node.steps.call(lambda core, now: self._taker(core).fetches.shorten_beat(grace))
        shares_gpu = share_gpu(self._node.endpoints(), welcome.endpoints)
        peer = Peer(
            up=True,
            since=self._node.clock(),
            transport=receiver.kind,
            incarnation=welcome.incarnation,
            shares_gpu=shares_gpu,
            grammars=welcome.grammars,
            images=welcome.images,
            drafts=drafts is not None,
        )
        self._changed(peer, "")

    async def _open_drafts(self, welcome: prefill_pb2.PrefillWelcome) -> Receiver | None:
        if not self._node.has_drafts_of(welcome):
            return None
        try:
            return await self._node.open_receiver(list(welcome.draft_endpoints), self.address, pool=1)
        except TransportError as error:
            _log.warning("pages of drafts do not come here", address=self.address, error=str(error))
            return None

    def receiver_of(self, effect: StartPull) -> Receiver | None:
        return self.draft_receiver if effect.drafts else self.receiver

    def received(self, response: prefill_pb2.PrefillResponse) -> None:
        address, node = self.address, self._node
        self._asked = None
        try:
            vocabulary, form = node.model_info.vocab_size, node.hidden_form
            messages = list(events_from(response, vocabulary, self._parts, form))
        except BatonError as error:
            self.link.reset(
                failed_precondition(f"{address} sent what cannot be: {error.message}", "PROTOCOL")
            )
            return

        self._node.steps.call(lambda core, now: self._taker(core).receive(address, messages, now))

    def lost(self, error: BatonError) -> None:
        self._session += 1
        self._parts.clear()
        self._node.spawn(self._leave_pools(), f"close pools of {self.address}")
        self.usable.clear()
        if error.code is grpc.StatusCode.FAILED_PRECONDITION:
            _log.error("worker refused", address=self.address, reason=error.reason, error=error.message)
        self._changed(Peer(up=False, since=0.0), f"{error.reason}: {error.message}")

    def _changed(self, peer: Peer, reason: str) -> None:
        address = self.address
        self._node.steps.call(lambda core, _: self._taker(core).peer_changed(address, peer, reason))

    async def close(self) -> None:
        await self.link.close()
        self._session += 1
        await self._leave_pools()

    def _leave_pools(self) -> Coroutine[Any, Any, None]:
        """They are left at once, and closed when this is awaited."""
        receivers = self.receiver, self.draft_receiver
        self.receiver = self.draft_receiver = None
        return _close(*receivers)


async def _close(*receivers: Receiver | None) -> None:
    for each in receivers:
        if each is not None:
            await each.close()


class PullTask:
    """Runs one pull and reports its end to the core, once and in every case: the destination pages are pinned
    until then."""

    def __init__(
        self,
        effect: StartPull,
        call: Callable[[Callable[[Any, float], None]], None],
        taker: Callable[[Any], PageTaker],
    ) -> None:
        """`call`: StepLoop.call of the core's loop. `taker`: in that core."""
        self.seconds: float | None = None
        """Duration of the copy; None until it is complete."""
        self.task: Any = None
        """In which `run` is awaited."""
        self._effect = effect
        self._call = call
        self._taker = taker
        self._begun = self._reported = self._stopped = False

    def stop(self) -> None:
        """Stops the pull; if it still waits for its step, at once."""
        self._stopped = True
        if self._begun:  # a task that is cancelled before never runs, and would report nothing
            self.task.cancel()

    async def run(self, receiver: Receiver | None) -> None:
        effect = self._effect
        error = "the pull was interrupted"
        self._begun = True
        try:
            if receiver is None:
                error = f"{effect.address} is not connected"
            elif not self._stopped:
                peer = receiver
                await peer.pull(effect.pairs, effect.step, lambda seconds: self._copied(peer, seconds))
        except TransportError as failure:
            error = str(failure)
        except Exception as failure:
            _log.exception("pull failed", address=effect.address)
            error = f"{type(failure).__name__}: {failure}"
        finally:
            if not self._reported:
                self._report(error, None)

    def _copied(self, receiver: Receiver, seconds: float) -> None:
        generations = receiver.generations([source for source, _ in self._effect.pairs])
        self.seconds = seconds
        self._report(None, generations)

    def _report(self, error: str | None, generations: list[int] | None) -> None:
        self._reported = True
        number, drafts = self._effect.pull, self._effect.drafts

        def ended(core: Any, now: float) -> None:
            pulls = core.handoffs.drafts if drafts else self._taker(core).fetches
            pulls.pull_ended(number, error, generations, now)

        self._call(ended)
