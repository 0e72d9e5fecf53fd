"""What a worker's pool and its host tier hold, published as vLLM does (vllm.distributed.kv_events, version
0.33): ZeroMQ messages of a topic, a number of 8 bytes and an EventBatch in msgpack, each kept for a while for
those who have missed it. Needs the extra `kv-events`."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from baton.config import WorkerConfig
from baton.kvcache.kv_cache_manager import KvCacheManager
from baton.kvcache.kv_events import Removed, RowDigests, Stored, TreeEvents, as_number
from baton.kvcache.tree_observer import is_withdrawn
from baton.rpc.address import is_loopback
from baton.rpc.errors import failed_precondition, invalid
from baton.rpc.logs import get_logger

if TYPE_CHECKING:
    import zmq

_log = get_logger()

AGAIN_SECONDS = 1.0
"""After a failure all is told anew, no sooner than this."""
PUBLISH_SECONDS = 0.05
BATCH_TOKENS = 65536
"""Tokens in a batch, beyond which the next event begins another one."""
KEPT_BATCHES = 10_000
KEPT_BYTES = 64 * 2**20
"""That can be asked for again, at most."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends an answer to who asks for batches again."""
CLOSE_SECONDS = 5.0

InSteps = Callable[[Callable[[], None]], None]
"""Has something called in the step thread, later."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    """Seconds since 1970."""
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    """Pages by their names in Cache.Watch."""
    parent_block_hash: int | None
    token_ids: list[int]
    """Tokens of all blocks."""
    block_size: int
    lora_id: None
    medium: str
    """GPU: the KV pool, also on a CPU; CPU: the host tier."""
    lora_name: None
    extra_keys: list[tuple[str] | None] | None = None
    """The namespace, if there is one, for the first block of a sequence, as vLLM has a cache salt."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class FollowedTree:
    """A prefix tree, and what is said of it."""

    def __init__(self, cache: KvCacheManager, medium: str) -> None:
        self.cache = cache
        self.events: TreeEvents | None = None
        self._medium = medium
        self._digests = RowDigests(cache.page_size)
        self._untold: set[int] = set()
        """Hashes of rows that are withdrawn."""

    def begin(self, in_steps: InSteps) -> None:
        """Has all that it holds told anew."""
        before, self.events = self.events, TreeEvents()
        events = self.events
        self._digests.held.clear()
        self._untold.clear()
        in_steps(lambda: self.cache.observe(events, before))

    def message(self, event: Stored | Removed) -> BlockStored | BlockRemoved | None:
        """None: readers need not know."""
        if isinstance(event, Removed):
            gone = list(map(as_number, self._digests.removed(event)))
            told = [each for each in gone if each not in self._untold]
            self._untold.difference_update(gone)
            return BlockRemoved(told, self._medium) if told else None
        parent = None if event.after is None else as_number(self._digests.held[event.after])
        hashes = list(map(as_number, self._digests.stored(event)))
        if is_withdrawn(event.namespace):
            self._untold.update(hashes)
            return None
        names: list[tuple[str] | None] | None = None
        if event.namespace and event.after is None:
            names = [(event.namespace,), *[None] * (len(hashes) - 1)]
        size, stride = self._digests.page_size, len(event.key) // len(event.rows)
        pages = (event.key[at : at + 4 * size] for at in range(0, len(event.key), stride))  # without seals
        tokens = array("I", b"".join(pages)).tolist()
        return BlockStored(hashes, parent, tokens, size, None, self._medium, None, names)


class KvEventPublisher:
    """A thread of its own, which waits for nobody: who reads too slowly misses messages and sees it by their
    numbers."""

    def __init__(self, config: WorkerConfig) -> None:
        """Binds its sockets. Raises BatonError."""
        import zmq

        self._context = zmq.Context()
        self._topic = config.kv_events_topic.encode()
        self._number = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._kept_bytes = 0
        self._trees: list[FollowedTree] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-kv-events", daemon=True)
        try:
            self._socket = self._bind(zmq.PUB, "kv_events", config.kv_events)
            replay = config.kv_events_replay
            self._replay = self._bind(zmq.ROUTER, "kv_events_replay", replay) if replay else None
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, field: str, address: str) -> zmq.Socket[bytes]:
        import zmq

        made = self._context.socket(kind)
        if kind == zmq.ROUTER:
            made.set_hwm(2 * (KEPT_BATCHES + 1))  # all that is kept, for one who reads slowly
        try:
            made.bind(address)
        except zmq.ZMQError as error:
            text = f"--{field.replace('_', '-')}: {address} cannot be bound: {error}"
            raise failed_precondition(text) from None
        _log.info("KV events", socket=field, address=made.getsockopt_string(zmq.LAST_ENDPOINT))
        return made

    def start(self, caches: dict[str, KvCacheManager], in_steps: InSteps) -> None:
        """caches: by medium."""
        self._trees = [FollowedTree(cache, medium) for medium, cache in caches.items()]
        self._in_steps = in_steps
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        begins, wait = True, 0.0
        while not self._closing.wait(wait):
            try:
                if begins:
                    self._begin()
                self._publish()
                self._answer()
                begins, wait = False, PUBLISH_SECONDS
            except Exception as error:
                _log.error("KV events begin again", exc_info=error)
                begins, wait = True, AGAIN_SECONDS

    def _begin(self) -> None:
        """Clears what readers know, which is another process', when this one is new."""
        self._send([AllBlocksCleared()])
        for tree in self._trees:
            tree.begin(self._in_steps)

    def _publish(self) -> None:
        batch: list[BlockStored | BlockRemoved] = []
        tokens = 0
        for tree in self._trees:
            while (events := tree.events) is not None and (event := events.take()) is not None:
                message = tree.message(event)
                if message is not None:
                    batch.append(message)
                tokens += len(event.key) // 4 if isinstance(event, Stored) else len(event.rows)
                if tokens >= BATCH_TOKENS:
                    self._send(batch)
                    batch, tokens = [], 0
        if batch:
            self._send(batch)
        if any(tree.events is not None and tree.events.overflown for tree in self._trees):
            self._begin()

    def _send(self, events: list[Any]) -> None:
        payload = self._encoder.encode(EventBatch(time.time(), events, 0))
        number = self._number.to_bytes(8, "big")
        self._number += 1
        if len(self._kept) == KEPT_BATCHES:
            self._drop()
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._drop()
        self._socket.send_multipart((self._topic, number, payload))  # a PUB socket drops rather than waits

    def _drop(self) -> None:
        self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        """Those who ask for all batches from a number on."""
        import zmq

        if self._replay is None:
            return
        while self._replay.poll(0):
            who, *asked = self._replay.recv_multipart()
            if len(asked) != 2:
                continue
            for number, payload in self._kept:
                if number >= asked[1]:
                    self._replay.send_multipart((who, b"", self._topic, number, payload), zmq.NOBLOCK)
            self._replay.send_multipart((who, b"", b"", END, b""), zmq.NOBLOCK)


def check_kv_events(config: WorkerConfig) -> None:
    """Raises BatonError."""
    for field in ("kv_events", "kv_events_replay"):
        address, option = getattr(config, field), f"--{field.replace('_', '-')}"
        if not address:
            continue
        if not config.kv_events:
            raise invalid(field, f"{option} is nothing without --kv-events")
        scheme, _, rest = address.partition("://")
        host, colon, port = rest.rpartition(":")
        if scheme != "ipc" and not (scheme == "tcp" and colon and port.isdecimal()):
            raise invalid(
                field, f"{option} {address!r}: write it as tcp://127.0.0.1:5557, tcp://*:5557 or ipc://PATH"
            )
        if scheme == "tcp" and not is_loopback(host) and not config.insecure:
            text = f"{option} {address}: whoever reaches it reads the tokens of prompts and answers"
            raise failed_precondition(f"{text}; give --insecure on a network where all may")
    if config.kv_events:
        try:
            import zmq  # noqa: F401
        except ImportError:
            text = "--kv-events needs pyzmq: pip install 'baton-serve[kv-events]'"
            raise failed_precondition(text) from None
