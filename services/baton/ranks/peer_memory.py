"""Collectives among ranks that share one GPU, over memory that they map from each other by CUDA IPC.

NCCL refuses two ranks of one GPU. Here a CUDA graph can hold every call, and nothing waits on the host. The
ranks' processes take turns on the GPU, about 2 ms each: this is for trials and tests, not for speed.
"""

from __future__ import annotations

from typing import Any

import torch

from baton.layers.shard import Shard
from baton.ranks.channel import CollectiveError
from baton.transport import TransportError, cuda


class PeerCommunicator:
    """A `Communicator`. What a call gives that has waited in vain for a rank is wrong; `check` shows it."""

    def __init__(self, shard: Shard, store: Any, seconds: float, device: torch.device) -> None:
        """`store`: torch's, where all ranks meet within its own time limit; `seconds`: about as long a call
        waits for the others. Blocks. Raises CollectiveError."""
        from baton.layers.kernels.exchange import BUFFER_BYTES, Exchange

        self._rank, self._ranks = shard.rank, shard.size
        self._store = store  # torch's file store opens its file again when it is destroyed
        self._buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._failed = self._told.numpy()
        torch.cuda.synchronize(device)
        try:
            cuda.use(device)
            handle, offset = cuda.export_memory(self._buffer.data_ptr())
            store.set(f"exchange {shard.rank}", handle + offset.to_bytes(8, "little"))
            addresses = [self._buffer.data_ptr()] * shard.size
            for rank in range(shard.size):
                if rank != shard.rank:
                    told = bytes(store.get(f"exchange {rank}"))
                    handle, offset = (
                        told[: cuda.HANDLE_BYTES],
                        int.from_bytes(told[cuda.HANDLE_BYTES :], "little"),
                    )
                    addresses[rank] = cuda.open_memory(handle) + offset
        except (TransportError, RuntimeError) as error:
            raise CollectiveError(f"the ranks do not meet: {cuda.one_line(error)}") from error
        self._exchange = Exchange(shard.rank, torch.tensor(addresses, device=device), self._told, seconds)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange.sum(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(len(x), 0 if self._rank else self._ranks * x.shape[1])
        self._exchange.gather(x, out)
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Of integers."""
        if self._rank:
            x.zero_()
        return self.all_reduce(x)

    def check(self) -> None:
        if self._failed[0]:
            raise CollectiveError(f"rank {self._rank} has waited in vain for another rank")
