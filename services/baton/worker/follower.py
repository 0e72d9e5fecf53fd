"""What a follower does: its shard of the model, its pool, its runner, and rank 0's plans."""

from __future__ import annotations

from typing import Any

import torch

from baton.checkpoint import resolve
from baton.config import WorkerConfig
from baton.engine.plan import Runner
from baton.kvcache.pool import KvPool
from baton.ranks.channel import Channel
from baton.ranks.communicator import COLLECTIVE_SECONDS, GroupCommunicator
from baton.ranks.followers import MakePool, Setup
from baton.ranks.plan_codec import PlanDecoder
from baton.transport import Segment
from baton.worker.model import attention_of, device_of, dtype_of, kv_layout, load
from baton.worker.runners import make_runner


class Follower:
    """Answers once after each of: its start, meeting the others and loading, each MakePool."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        """Loads. Raises CheckpointError, CollectiveError and others."""
        self._channel = channel
        self._config: WorkerConfig = setup.config
        self._device = device_of(self._config.device)
        torch.set_num_threads(self._config.threads)
        channel.send("started")
        communicator = GroupCommunicator(setup.shard, setup.rendezvous, COLLECTIVE_SECONDS)
        path, dtype = resolve(self._config.model), dtype_of(self._config.dtype, self._device)
        self._model = load(self._config, path, dtype, self._device, setup.shard, communicator)
        self._runner: Runner[Any] | None = None
        self._decoder = PlanDecoder()
        channel.send("loaded")

    def run(self) -> None:
        """Until rank 0 closes the channel; raises ChannelError then."""
        while True:
            message = self._channel.next()
            if isinstance(message, MakePool):
                self._make(message)
                self._channel.send("ready")
                continue
            threads, plan = message
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            assert self._runner is not None
            self._runner.launch(self._decoder.decode(plan))

    def _make(self, asked: MakePool) -> None:
        self._runner, self._decoder = None, PlanDecoder()
        layout = kv_layout(self._model, asked.page_size, asked.context, self._device)
        heads = self._model.shard.kv_heads(layout.num_kv_heads)
        pool = KvPool(layout, asked.pages, storage=Segment.join(asked.segment), heads=heads)
        prefill, decode = attention_of(self._config, self._model, self._device)
        rows, context = self._config.max_rows, asked.context
        self._runner = make_runner(self._model, pool, prefill[0], decode[0], rows, context)

    def close(self) -> None:
        """Frees its memory."""
        self._runner = None
