"""KV events in a process: what overflows is told anew, and what cannot be published is refused in a line."""

import time

import msgspec
import pytest
import zmq

from baton.config import PrefillConfig
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_events import TreeEvents, TreeLog
from baton.rpc.errors import BatonError
from baton.worker import kv_event_publisher
from baton.worker.kv_event_publisher import KvEventPublisher, check_kv_events

PAGE = 4


def read(replay):
    """All batches that are kept."""
    replay.send_multipart((b"", bytes(8)))
    batches = []
    while True:
        assert replay.poll(10_000)
        _, _, number, payload = replay.recv_multipart()
        if not payload:
            return batches
        assert int.from_bytes(number, "big") == len(batches)
        batches.append(msgspec.msgpack.decode(payload)[1])


def held(batches):
    blocks = set()
    for event in (event for batch in batches for event in batch):
        if event["type"] == "BlockStored":
            blocks |= set(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            blocks -= set(event["block_hashes"])
        else:
            blocks = set()
    return blocks


def holds(tree):
    log, events = TreeLog(PAGE), TreeEvents()
    tree.observe(events)
    tree.observe(None, events)
    while (event := events.take()) is not None:
        log.apply(event)
    return set(log.since(None).stored)


def test_an_overflow_is_followed_by_all_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "TreeEvents", lambda: TreeEvents(8))
    monkeypatch.setattr(kv_event_publisher, "PUBLISH_SECONDS", 0.2)
    tree = PrefixTree(PAGE)
    cache = KvCacheManager(PageAllocator(100), tree)
    replay_address = f"ipc://{tmp_path}/replay"
    publisher = KvEventPublisher(
        PrefillConfig(kv_events="tcp://127.0.0.1:0", kv_events_replay=replay_address)
    )
    replay = publisher._context.socket(zmq.DEALER)
    replay.connect(replay_address)
    calls = []
    publisher.start({"GPU": cache}, calls.append)
    try:
        tree.insert([0] * PAGE, [(0,)])
        deadline, batches, later = time.monotonic() + 20, [], iter(range(1, 60))
        while held(batches) != holds(tree) or next(later, None) is not None:
            while calls:
                calls.pop(0)()
                for page in later:  # more than may wait
                    tree.insert([page] * PAGE, [(page,)])
                tree.evict(1)
            assert time.monotonic() < deadline
            batches = read(replay)
        assert len(holds(tree)) > 50
        assert batches.count([{"type": "AllBlocksCleared"}]) >= 2
    finally:
        replay.close(0)
        publisher.close()
    assert not publisher._thread.is_alive()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_events": "5557"}, "write it as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://127.0.0.1"}, "write it as"),
        ({"kv_events": "tcp://*:5557"}, "give --insecure"),
        ({"kv_events_replay": "tcp://127.0.0.1:5557"}, "nothing without --kv-events"),
    ],
)
def test_what_cannot_be_published_is_refused(options, says):
    with pytest.raises(BatonError, match=says):
        check_kv_events(PrefillConfig(**options))


def test_an_address_in_use_is_named(tmp_path):
    first = KvEventPublisher(PrefillConfig(kv_events="tcp://127.0.0.1:0"))
    address = first._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(BatonError, match=r"--kv-events: .* cannot be bound: Address already in use"):
        KvEventPublisher(PrefillConfig(kv_events=address))
    first.close()


def test_what_is_withdrawn_is_removed_and_all_else_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_event_publisher, "PUBLISH_SECONDS", 0.01)
    tree = PrefixTree(PAGE)
    address = f"ipc://{tmp_path}/replay"
    publisher = KvEventPublisher(PrefillConfig(kv_events="tcp://127.0.0.1:0", kv_events_replay=address))
    replay = publisher._context.socket(zmq.DEALER)
    replay.connect(address)
    calls = []
    publisher.start({"GPU": KvCacheManager(PageAllocator(100), tree)}, calls.append)

    def until(count):
        deadline = time.monotonic() + 20
        while len(held(batches := read(replay))) != count:
            assert time.monotonic() < deadline, batches
            while calls:
                calls.pop(0)()
            time.sleep(0.01)
        return batches

    try:
        tree.insert([0] * PAGE + [1] * PAGE, [(0,), (1,)])
        tree.insert([2] * PAGE, [(2,)])
        until(3)
        tree.withdraw_prefix(tree.encode([0] * PAGE), "")
        until(1)
        tree.insert([3] * PAGE, [(3,)], "tenant")
        batches = until(2)
        assert sum(event["type"] == "AllBlocksCleared" for batch in batches for event in batch) == 1
    finally:
        publisher.close()
