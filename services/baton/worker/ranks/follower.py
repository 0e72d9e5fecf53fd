"""What a follower does: its shard of the model, its pool, its runner, and rank 0's plans."""

from __future__ import annotations

import gc
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from baton.config import WorkerConfig
from baton.engine.plan import Runner
from baton.kvcache.kv_pool import PagePool, PoolLayout
from baton.model_path import resolve
from baton.rpc.address import new_incarnation
from baton.rpc.logs import get_logger
from baton.transport import Segment
from baton.worker.memory import keep_freed_memory
from baton.worker.model import (
    attention_of,
    dtype_of,
    kv_layout,
    load,
    model_fingerprint,
    own_part,
    rank_device,
    use_device,
)
from baton.worker.pool import first_byte, gpu_pool
from baton.worker.ranks.channel import Channel, ChannelClosed, ChannelError
from baton.worker.ranks.communicator import Rendezvous
from baton.worker.ranks.followers import EXIT_LOST, IMPORT_SECONDS
from baton.worker.ranks.leader import meet
from baton.worker.ranks.messages import End, Loaded, MakePool, Meet, Ready, Setup, Started
from baton.worker.ranks.pages import serve_pages
from baton.worker.ranks.plan_codec import PlanDecoder
from baton.worker.ranks.rendezvous import JOIN_SECONDS
from baton.worker.runners import make_runner

_log = get_logger()


PAGES_SECONDS = 5.0
"""For a follower to end whose pages rank 0 does not reach any more."""


class Follower:
    """Answers once after each of: its start, Meet (when it has loaded, too), each MakePool."""

    def __init__(
        self, setup: Setup, channel: Channel, parent: Channel | None = None, pages: Channel | None = None
    ) -> None:
        """Loads, once all have come. Where rank 0 is on another host, `parent` is told when this rank is
        ready, and the first one of a host serves `pages`. Raises ChannelError, CheckpointError and others."""
        self._channel, self._parent, self._pages = channel, parent, pages
        self._segment: Segment | None = None
        self._config: WorkerConfig = setup.config
        self._device = rank_device(self._config.device, setup.shard)
        use_device(self._device)
        if self._device.type == "cpu":
            keep_freed_memory()
        torch.set_num_threads(self._config.threads)
        channel.send(Started())
        if not isinstance(channel.receive(JOIN_SECONDS + IMPORT_SECONDS), Meet):
            raise ChannelClosed("rank 0 ends before all ranks have come")
        assert setup.rendezvous is not None
        meeting = Rendezvous(setup.rendezvous, setup.address)
        communicator = meet(self._config, setup.shard, meeting, self._device)
        path, dtype = resolve(self._config.model), dtype_of(self._config.dtype, self._device)
        self._model = load(self._config, path, dtype, self._device, setup.shard, communicator)
        self._runner: Runner[Any] | None = None
        self._decoder = PlanDecoder()
        name = model_fingerprint(self._config, path, self._model, self._device)
        channel.send(Loaded(name))

    def run(self) -> None:
        """Until rank 0 says that it ends. Raises ChannelError when it closes the channel."""
        while not isinstance(message := self._channel.next(), End):
            if isinstance(message, MakePool):
                self._make(message)
                continue
            if not isinstance(message, tuple):
                raise ChannelError(f"{type(message).__name__} came where a plan was expected")
            threads, plan = message
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            assert self._runner is not None
            if self._model.communicator is not None:
                self._model.communicator.check()
            self._runner.launch(self._decoder.decode(plan))

    def _make(self, asked: MakePool) -> None:
        self._runner, self._decoder = None, PlanDecoder()
        layout = kv_layout(self._model, asked.page_size, asked.context)
        part = b""
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # what the pool before, and its runner, took
            pool = gpu_pool(layout, asked.pages, self._device, self._model.shard)
            part = _export(pool, first_byte(layout, self._model.shard))
        else:
            pool = self._host_pool(layout, asked)
        prefill, decode = attention_of(self._config, self._model, self._device)
        where = prefill[0], decode[0], asked.context, asked.drafts, asked.tap
        self._runner = make_runner(self._config, self._model, pool, *where)
        made = None if self._segment is None else str(self._segment.path)
        resident = psutil.Process().memory_info().rss
        ready = Ready(os.getpid(), platform.node(), str(self._device), resident, made, part)
        self._channel.send(ready)
        if self._parent is not None:
            self._parent.send(ready)

    def _host_pool(self, layout: PoolLayout, asked: MakePool) -> PagePool:
        layout, heads = own_part(layout, self._model.shard, self._device)
        if asked.segment is not None:
            memory = Segment.join(Path(asked.segment))
        else:
            self._segment = Segment.create(asked.pages, layout.page_bytes, new_incarnation())
            memory = self._segment.pages
            assert self._pages is not None
            serving = (self._pages, memory, layout.page_bytes)
            threading.Thread(target=_serve, args=serving, name="pages of this host", daemon=True).start()
        return PagePool(layout, asked.pages, storage=memory, heads=heads)

    def close(self) -> None:
        """Frees its memory."""
        self._runner = None
        if self._segment is not None:
            self._segment.close()


def _export(pool: PagePool, first: int) -> bytes:
    from baton.transport.cuda_ipc import export_part

    return export_part(pool.raw, first).SerializeToString()


def _serve(channel: Channel, memory: memoryview, page_bytes: int) -> None:
    try:
        serve_pages(channel, memory, page_bytes)
    except Exception as error:
        time.sleep(PAGES_SECONDS)  # rank 0 may be ending, and says so on the other connection
        _log.error("rank 0 does not reach the pages of this host any more", error=str(error))
        os._exit(EXIT_LOST)
