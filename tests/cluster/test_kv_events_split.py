"""KV events over real processes: a reader that knows nothing else has what a node's caches hold.

BATON_VLLM_KV_EVENTS=FILE: vllm/distributed/kv_events.py of a vLLM release (0.33), whose classes decode then;
without it, classes written here after that file do.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import msgspec
import pytest
import zmq
from deployment import Deployment
from polling import until
from process import Process
from test_cache_stream import PAGE, Watch, ask, prompt


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(_Event):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def batch_type() -> Any:
    """vLLM's own KVEventBatch, if its file is there, without the rest of vLLM."""
    path = os.environ.get("BATON_VLLM_KV_EVENTS")
    if not path:
        return KVEventBatch
    stubs = {
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")
        ),
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    for name, values in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(values)
    spec = spec_from_file_location("vllm_kv_events", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.KVEventBatch


class Reader:
    """Knows what the events say, by medium; asks for what it has missed."""

    def __init__(self, address: str, replay: str) -> None:
        self.held: dict[str, set[int]] = {}
        self.blocks: dict[int, tuple[int | None, str, tuple[int, ...]]] = {}
        """Their parents, namespaces and tokens."""
        self._decoder = msgspec.msgpack.Decoder(type=batch_type())
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(address)
        self._socket.subscribe("kv@")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self.next = 0
        self.replayed = self.cleared = 0

    def read(self) -> None:
        """All that is there."""
        while self._socket.poll(0):
            topic, number, payload = self._socket.recv_multipart()
            assert topic == b"kv@test"
            if int.from_bytes(number, "big") > self.next:
                self.catch_up()
            if int.from_bytes(number, "big") == self.next:
                self._apply(payload)

    def catch_up(self) -> None:
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            assert self._replay.poll(10_000), "no answer"
            _, topic, number, payload = self._replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return
            assert topic == b"kv@test" and int.from_bytes(number, "big") == self.next
            self.replayed += 1
            self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        self.next += 1
        batch = self._decoder.decode(payload)
        assert batch.ts > 1e9 and batch.data_parallel_rank == 0
        for event in batch.events:
            match type(event).__name__:
                case "AllBlocksCleared":
                    self.held.clear()
                    self.cleared += 1
                case "BlockRemoved":
                    held = self.held[event.medium]
                    assert held >= set(event.block_hashes)
                    held -= set(event.block_hashes)
                case _:
                    self._stored(event)

    def _stored(self, event: Any) -> None:
        held, parent = self.held.setdefault(event.medium, set()), event.parent_block_hash
        assert event.block_size == PAGE and len(event.token_ids) == PAGE * len(event.block_hashes)
        assert parent is None or parent in held
        (salt,) = (event.extra_keys or [None])[0] or [self.blocks[parent][1] if parent is not None else ""]
        for index, block in enumerate(event.block_hashes):
            assert block not in held
            held.add(block)
            self.blocks[block] = (parent, salt, tuple(event.token_ids[index * PAGE : (index + 1) * PAGE]))
            parent = block

    def holds(self, tokens: list[int], salt: str = "") -> int:
        """So many tokens, by what the blocks are said to hold."""
        held = {self.blocks[block]: block for block in self.held.get("GPU", ())}
        parent: int | None = None
        for start in range(0, len(tokens), PAGE):
            block = held.get((parent, salt, tuple(tokens[start : start + PAGE])))
            if block is None:
                return start
            parent = block
        return len(tokens)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, deployments) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("events")
    worker = ("--kv-tokens", str(64 * PAGE), "--context-length", "512", "--host-memory", "8M")
    events = ("--kv-events", f"ipc://{folder}/events", "--kv-events-replay", f"ipc://{folder}/replay")
    with Deployment.split(
        folder, "demo", prefill=0, worker=worker, decode_flags=(*events, "--kv-events-topic", "kv@test")
    ) as deployment:
        deployments.append(deployment)
        yield deployment
        for process in deployment.processes:
            assert "Traceback" not in process.log.read_text(), process.log


def reader_of(deployment: Deployment) -> Reader:
    return Reader(f"ipc://{deployment.folder}/events", f"ipc://{deployment.folder}/replay")


def reads_all(reader: Reader, node: Process) -> bool:
    """The reader's state is what Cache.Watch says."""
    with Watch(node) as watch:
        watch.until(lambda: True)
        told = set(watch.view._held)
    reader.read()
    return reader.held.get("GPU", set()) == told


async def test_a_reader_has_exactly_what_the_node_holds(deployment):
    """Many prompts, of which some begin alike, in a pool of 64 pages: most are evicted again."""
    node, client = deployment.decode, deployment.client()
    early = reader_of(deployment)
    for turn in range(12):
        shared = prompt(turn % 3, 4 * PAGE)
        for seed in range(3):
            ask(client, [*shared, *prompt(100 * turn + seed, 6 * PAGE)], namespace="tenant" * (seed % 2))
        early.read()
    await until(lambda: reads_all(early, node), "the reader has all")
    first, last = ([*prompt(2, 4 * PAGE), *prompt(seed, 6 * PAGE)] for seed in (1101, 1102))
    assert early.holds(last) == early.holds(first, "tenant") == len(last)
    assert early.holds(first) == 4 * PAGE and early.held["CPU"], "demoted pages too"
    late = reader_of(deployment)
    late.catch_up()
    await until(lambda: reads_all(late, node), "one that comes later has all")

    def alike() -> bool:  # what is demoted is told a little later
        early.read()
        late.read()
        return late.held == early.held

    await until(alike, "both have the same")
    assert late.replayed and late.cleared == 1
    early.close()
    late.close()


async def test_a_new_process_tells_readers_to_forget(deployment):
    node = deployment.decode
    reader = reader_of(deployment)
    reader.catch_up()
    assert reader.held
    node.kill()
    node.start()
    node.wait_ready()
    reader.close()
    reader = reader_of(deployment)
    reader.held = {"GPU": {1, 2, 3}}
    reader.catch_up()
    await until(lambda: reads_all(reader, node), "nothing is held")
    assert not reader.held
    reader.close()
