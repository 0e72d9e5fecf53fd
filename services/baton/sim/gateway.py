"""A simulated gateway: gateway.shell and its requests over simulated streams, with clients that read at times
that the scenario draws."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from baton.config import GatewayConfig
from baton.gateway.auto_roles import AutoRoles
from baton.gateway.cache_view import PromptPages
from baton.gateway.media_fetch import MediaFetcher
from baton.gateway.picture_memory import PictureName
from baton.gateway.pictures import PictureStore
from baton.gateway.pictures_server import PicturesServicer
from baton.gateway.prompts import GatewaySession
from baton.gateway.request import GatewayRequest
from baton.gateway.request_log import EndedRequest
from baton.gateway.routing import RequestRouting
from baton.gateway.runtime import Cancellable
from baton.gateway.shell import RunningRequest
from baton.pictures.decoder import Picture
from baton.rpc.errors import BatonError, from_status, unavailable
from baton.sim.auto_roles import LOOK_SECONDS, SimAutoRoles
from baton.sim.calls import serve
from baton.sim.checks import Ledger, text_of
from baton.sim.event_loop import VirtualLoop
from baton.sim.images import SETTINGS, decoded
from baton.sim.model import VOCAB
from baton.sim.network import Endpoint, Network, SimLink
from baton.sim.process import SimProcess
from baton.sim.scenario import GatewaySettings
from baton.sim.scenario_requests import RequestSpec
from baton.sim.tasks import sleep
from baton.sim.virtual_gateway import VirtualGateway, VirtualTokenizer
from baton.sim.worker import Worker
from baton.sim.world import Violation
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, decode_pb2, inference_pb2, node_pb2, tokenizer_pb2
from baton.worker.convert import prompt_logprobs_from
from baton.worker.handoff_messages import sampling_to

BOUND_SECONDS = 0.5
"""How much later than its deadline a request may end, while its gateway runs."""
_WORDS = [text_of([token]).encode() for token in range(VOCAB)]
VOCABULARY = Vocabulary(_WORDS, _WORDS, frozenset(), byte_fallback=False, size=VOCAB)


class GuessedSources(RequestRouting):
    """Views of caches are not simulated: any worker may be said to hold any part of a prompt."""

    def __init__(self, gateway: SimGateway, number: int, tokens: Sequence[int], namespace: str) -> None:
        super().__init__(gateway.router, number, PromptPages(tokens, namespace))
        self._gateway = gateway
        self._tokens = len(tokens)

    def sources(self, decode: str, prefill: Sequence[str]) -> list[common_pb2.PromptSource]:
        gateway, rng = self._gateway, self._gateway.world.rng(f"sources {self._gateway.name}")
        found = []
        for address in gateway.workers if gateway.names_sources else ():
            host = gateway.network.host(address)
            if isinstance(host, Worker) and rng.random() < 0.6:
                incarnation = host.incarnation if rng.random() < 0.9 else 1
                tokens = rng.randrange(1, self._tokens + 4)
                source = common_pb2.PromptSource(address=address, incarnation=incarnation, tokens=tokens)
                found.append(source)
        rng.shuffle(found)
        return found


class SimGateway(SimProcess, VirtualGateway):
    role = "gateway"

    def __init__(
        self,
        network: Network,
        name: str,
        life: int,
        ledger: Ledger,
        settings: GatewaySettings,
        decode: tuple[str, ...],
        prefill: tuple[str, ...],
        encode: tuple[str, ...] = (),
    ) -> None:
        SimProcess.__init__(self, network, name, life)
        config = GatewayConfig(
            tokenizer=(),
            decode=(),
            routing=settings.routing,
            max_resumes=settings.max_resumes,
            resume_wait_seconds=settings.wait,
            silence_seconds=settings.silence,
            max_unread_tokens=settings.max_unread,
            slow_reader_seconds=settings.slow_reader,
            recorder_events=0,
        )
        rng = self.world.rng(f"tokenizer {name}")
        tokenizer = VirtualTokenizer(
            self.world, self.loop, VOCABULARY, lambda: rng.choice((0.0, 0.0, 0.01, 0.2))
        )
        VirtualGateway.__init__(self, self.world, self.loop, self.who, config, tokenizer)
        self.virtual = VirtualLoop(
            self.world, self.loop, self.clock, (self.copy_thread, lambda: rng.random() / 20)
        )
        self._sees = settings.image_memory > 0
        if self._sees:
            assert tokenizer.model is not None
            tokenizer.model.image_settings.CopyFrom(SETTINGS)
            self.pictures = SimPictures(settings.image_memory, self.metrics.image)
        self._ledger = ledger
        self.workers = (*decode, *prefill)
        self.names_sources = settings.sources
        bounds = settings.auto_roles
        self.roles = SimAutoRoles(self, bounds) if bounds is not None else None
        if bounds is not None:
            self.auto_roles = AutoRoles(
                config, self.nodes, self.router, self, self.metrics, bounds, LOOK_SECONDS
            )
            self.auto_roles.start()
        self._requests: dict[int, GatewayRequest] = {}
        """By the number in the scenario, until they have ended."""
        for role, addresses in (("decode", decode), ("prefill", prefill), ("encode", encode)):
            for address in addresses:
                self.nodes.add(role, address)

    def hand_back(self) -> None:
        """The streams of the gateway's clients end with it."""

    @property
    def busy(self) -> str:
        return f"{self.running} requests" if self.running else ""

    def paused(self, address: str, number: int) -> bool | None:
        """Whether a request that runs at this decode node pauses; None: it does not run there."""
        running = (each for each in self._requests.values() if each.log.terminal is None)
        return next(
            (r._reader.paused for r in running if r.number == number and r.attempts.address == address), None
        )

    def accept(self, endpoint: Endpoint) -> None:
        with self.virtual.running():
            serve(self.network, self.virtual, endpoint, PicturesServicer(self.pictures).Fetch)

    def check_idle(self) -> None:
        held = [kept.picture.digest.hex() for kept in self.pictures.memory.all() if kept.holds]
        if held:
            raise Violation(f"quiescence: {self.who} holds the pictures {held} of requests that have ended")

    # --- the world around it: gateway.runtime ----------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Cancellable:
        return self.virtual.spawn(work, name) if self._sees else super().spawn(work, name)

    async def pictures_address(self) -> str:
        return self.name

    def make_link(
        self,
        address: str,
        hello: Callable[[], decode_pb2.GenerateCommand],
        on_message: Callable[[decode_pb2.StepEvents], None],
        on_up: Callable[[decode_pb2.StepEvents], None],
        on_down: Callable[[BatonError], None],
    ) -> SimLink:
        turns: set[tuple[int, int]] = set()
        """Request and attempt of suspects that the node computes, and has sent no token of."""

        def receive(message: decode_pb2.StepEvents) -> None:
            turns.update((e.request, e.attempt) for e in message.events if e.HasField("turn"))
            turns.difference_update((delta.request, delta.attempt) for delta in message.tokens)
            on_message(message)

        def down(error: BatonError) -> None:
            for number, request in self._requests.items():
                if (request.number, request.attempt) in turns:
                    self._ledger.lost_turn(number)
            turns.clear()
            on_down(error)

        return self.link(address, hello, receive, on_up, down)

    async def node_info(self, address: str) -> node_pb2.NodeInfo:
        await sleep(self.world, self.loop, self.network.latency(self.name, address))
        host = self.network.host(address)
        if not isinstance(host, Worker) or self.network.is_cut(self.name, address):
            raise unavailable(f"{address} does not answer")
        return node_pb2.NodeInfo(
            role="decode", address=address, incarnation=host.incarnation, model=host.model_info
        )

    def follow_load(self, address: str) -> Cancellable:
        """Views of caches are not simulated, and loads only where roles depend on them: the router knows what
        this gateway has sent."""
        if self.roles is not None:
            return self.spawn(self.roles.follow(address), f"load of {address}")
        return self.after(0.0, lambda: None)

    async def set_role(self, address: str, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        assert self.roles is not None
        return await self.roles.set_role(address, role, seconds)

    def ended(
        self, request: RunningRequest, outcome: str, ended: EndedRequest, error: BatonError | None
    ) -> None:
        super().ended(request, outcome, ended, error)
        counted, received = self.metrics.output_tokens.value, self._totals.output_tokens
        received += sum(each.log.output_tokens for each in self._running)
        if counted != received:
            raise Violation(f"count: {self.who} has counted {counted} tokens and received {received}")

    def routing(
        self, start: decode_pb2.DecodeStart, tokens: Sequence[int], session: GatewaySession | None
    ) -> RequestRouting:
        super().routing(start, tokens, session)
        return GuessedSources(self, start.request, tokens, start.namespace)

    # --- what clients ask -------------------------------------------------------------------------------

    def ask(self, spec: RequestSpec) -> None:
        number = spec.number
        start = inference_pb2.GenerateStart(
            id=str(number),
            sampling=sampling_to(spec.params),
            n=spec.n,
            timeout_ms=round(1000 * spec.timeout),
            namespace=spec.namespace,
            priority=spec.priority,
            resume=spec.resume,
        )
        if spec.images:
            start.chat.CopyFrom(chat_of(spec))
            start.raw_output = True
        else:
            start.text = text_of(spec.prompt)
        start.sampling.stop.extend(spec.stop)
        reader = _Reader(self, spec, self._ledger)
        request = reader.request = self._requests[number] = GatewayRequest(
            self, start, reader.wake, self.api_key
        )
        request.begin()
        # Made after the gateway's own timer: when both are due at the end of a stall, that one comes first.
        self.after(spec.timeout + BOUND_SECONDS, partial(self._look, number, request))

    def _look(self, number: int, request: GatewayRequest) -> None:
        if request.log.terminal is None:
            raise Violation(f"deadline: request {number} has not ended within its deadline and a bound")

    def cancel(self, spec: RequestSpec) -> None:
        request = self._requests.get(spec.number)
        if self._ledger.cancelled(spec.number) and request is not None:
            request.cancel("cancelled by the client")

    def read(self, number: int) -> None:
        """The client has read everything of the request."""
        self._requests.pop(number, None)


def chat_of(spec: RequestSpec) -> tokenizer_pb2.ChatPrompt:
    """One message of texts and images."""
    chat, done = tokenizer_pb2.ChatPrompt(), 0
    parts = chat.messages.add(role="user").parts
    for start, image in spec.images:
        parts.add(text=text_of(spec.prompt[done:start]))
        parts.add(image=image.file)
        done = start + len(image.tokens)
    parts.add(text=text_of(spec.prompt[done:]))
    return chat


class SimPictures(PictureStore):
    """Whose files need no decoder."""

    def __init__(self, max_bytes: int, counted: Callable[[str], None]) -> None:
        super().__init__(max_bytes, MediaFetcher(()), counted)

    async def _decoded(self, name: PictureName, data: bytes | None, field_path: str) -> Picture:
        assert data is not None
        return await asyncio.get_running_loop().run_in_executor(None, decoded, data)


class _Reader:
    """A client's end of one request. It reads a moment after there is something to read, and once pauses for
    as long as the scenario says."""

    def __init__(self, gateway: SimGateway, spec: RequestSpec, ledger: Ledger) -> None:
        self.request: GatewayRequest | None = None
        self._gateway = gateway
        self._spec = spec
        self._ledger = ledger
        self._due = False
        self._rests = spec.rests

    def wake(self) -> None:
        if not self._due:
            self._due = True
            delay = self._gateway.world.rng(f"client {self._gateway.name}").choice((0.0, 0.0, 0.05, 0.3))
            self._gateway.after(delay, self._read)

    def _read(self) -> None:
        request, number = self.request, self._spec.number
        assert request is not None
        if self._rests and request.log.has_output:
            self._gateway.after(self._rests, self._read)
            self._rests = 0.0
            return
        self._due = False
        while events := request.take():
            for event in events:
                self._take(number, request, event)

    def _take(self, number: int, request: GatewayRequest, event: inference_pb2.GenerateResponse) -> None:
        kind = event.WhichOneof("kind")
        if kind == "delta":
            delta = event.delta
            if delta.prompt_logprobs:
                self._ledger.prompt(number, prompt_logprobs_from(delta.prompt_logprobs))
            self._ledger.deliver(number, delta.choice, delta.token_ids, delta.text)
        elif kind != "accepted":
            self._ledger.resumed += request.attempts.resumed if request.log.has_output else 0
            self._gateway.read(number)
            if kind == "finished":
                self._ledger.finished(number, event.finished.usage)
            else:
                error = from_status(event.failed)
                self._ledger.failed(number, error.code.name, error.reason, error.message)
