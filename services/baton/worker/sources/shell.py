"""What a worker does with messages about cached pages: `CacheLending` with those of borrowers (Cache.Lend),
`SourcePeers` with those of the workers that it borrows from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.config import PrefillConfig
from baton.engine.image_spans import with_placeholders
from baton.handoff.messages import PromptSource
from baton.rpc.channel import Dial
from baton.rpc.errors import failed_precondition, invalid
from baton.rpc.link import Link
from baton.v1 import cache_pb2_grpc, common_pb2, prefill_pb2
from baton.worker.convert import layout_difference, name_from
from baton.worker.handoff_messages import several
from baton.worker.images.spans import check_spans, spans_from
from baton.worker.lease_stream import LeaseStream, events_of
from baton.worker.peers import PagePeer, PagePeers
from baton.worker.shell import WorkerShell
from baton.worker.sources.sharing import GRACE_SECONDS, SILENCE_SECONDS, LeaseOutputs

MAX_SOURCES = 16
"""That a request may name."""


def sources_from(sources: Sequence[common_pb2.PromptSource]) -> tuple[PromptSource, ...]:
    """Raises BatonError."""
    if len(sources) > MAX_SOURCES:
        raise invalid("sources", f"sources has {len(sources)} entries; at most {MAX_SOURCES} are allowed")
    return tuple(
        PromptSource(each.address, each.incarnation, each.tokens) for each in sources if each.address
    )


class CacheLending:
    """A worker.caller_stream.Service. A draining node lends until it ends."""

    def __init__(self, node: WorkerShell[Any], make_stream: Callable[[int], LeaseStream]) -> None:
        """`make_stream`: for a caller of this incarnation."""
        self._node = node
        config = node.config
        self._grace = config.lease_grace_seconds if isinstance(config, PrefillConfig) else GRACE_SECONDS
        self._make_stream = make_stream

    def deliver(self, outputs: LeaseOutputs) -> None:
        for holder, sent in outputs.items():
            assert isinstance(holder, LeaseStream)
            events = [event for output in sent for event in events_of(output)]
            if not holder.put(prefill_pb2.PrefillResponse(events=events)):
                self.drop(holder)

    def open(self, hello: prefill_pb2.PrefillHello) -> LeaseStream:
        difference = layout_difference(self._node.layout, hello.layout)
        if difference is not None:
            raise failed_precondition(difference, "LAYOUT_MISMATCH")
        self._node.require_turning()
        stream = self._make_stream(hello.incarnation)
        self._node.steps.call(lambda core, now: core.sharing.lender.leases.connect(stream, now))
        return stream

    def welcome(self) -> list[prefill_pb2.PrefillResponse]:
        welcome = prefill_pb2.PrefillWelcome(
            incarnation=self._node.incarnation,
            layout=self._node.layout,
            endpoints=self._node.endpoints(),
            lease_grace_ms=int(self._grace * 1000),
        )
        return [prefill_pb2.PrefillResponse(events=[prefill_pb2.PrefillEvent(welcome=welcome)])]

    def several(self, message: prefill_pb2.PrefillRequest) -> Sequence[prefill_pb2.PrefillRequest]:
        return message.several.requests

    def half_closed(self, stream: LeaseStream) -> None:
        """The caller cannot release any more."""
        stream.close()

    def drop(self, stream: LeaseStream) -> None:
        self._node.steps.call(lambda core, _: core.sharing.lender.disconnect(stream))

    def handle_command(self, request: prefill_pb2.PrefillRequest, stream: LeaseStream) -> None:
        kind, call = request.WhichOneof("kind"), self._node.steps.call
        if kind == "cached":
            cached, name = request.cached, name_from(request.cached.attempt)
            if name in stream.names:
                text = f"attempt {name} was started twice on this stream"
                raise invalid("cached.attempt", text, "DUPLICATE_ATTEMPT")
            stream.names.add(name)
            check_spans(cached.images, len(cached.token_ids), self._node.model_info, cut=True)
            tokens = with_placeholders(cached.token_ids, spans_from(cached.images))
            namespace = cached.namespace
            call(lambda core, now: core.sharing.lender.lend(stream, name, tokens, namespace, now))
        elif kind == "cancel":
            cancelled = name_from(request.cancel.attempt)
            call(lambda core, _: core.sharing.lender.cancel(stream, cancelled))
        elif kind == "release":
            released = name_from(request.release.attempt)
            call(lambda core, _: core.sharing.lender.release(stream, released))
        elif kind == "heartbeat":
            call(lambda core, now: core.sharing.lender.leases.heartbeat(stream, now))
        else:
            kinds = "cached, cancel, release, heartbeat, or several of these"
            raise invalid("kind", f"each message on Cache.Lend after `hello` sets {kinds}")


def source_link(
    address: str, peer: PagePeer, dial: Dial
) -> Link[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]:
    return Link(
        address,
        lambda channel: cache_pb2_grpc.CacheStub(channel).Lend,
        hello=peer.hello,
        on_message=peer.received,
        on_up=peer.welcomed,
        on_down=peer.lost,
        join=several,
        dial=dial,
    )


class SourcePeers(PagePeers):
    """The workers that this one borrows cached pages from."""

    def __init__(self, node: WorkerShell[Any]) -> None:
        super().__init__(
            node,
            node.make_source_link,
            lambda core: core.sharing.borrower,
            request_seconds=node.config.request_seconds,
            silence=SILENCE_SECONDS,
        )

    def lenders(self, sources: Sequence[PromptSource]) -> tuple[PromptSource, ...]:
        """Connects to those of a request's sources that are other workers, if there is room for them; they
        are what it may borrow from."""
        others = tuple(each for each in sources if each.incarnation != self._node.incarnation)
        if not self.has_room([each.address for each in others]):
            return ()
        for each in others:
            self.connect(each.address)
        return others
