"""Collectives among ranks on the GPUs of a host, over memory that they map from each other by CUDA IPC.

A CUDA graph can hold every call, nothing waits on the host, and waits on the device have a limit. Ranks may
share a GPU, for trials and tests: their processes take turns on it, about 2 ms each.
"""

from __future__ import annotations

from typing import Any

import torch

from baton.layers.tensor_parallel import Shard
from baton.transport import TransportError, cuda_runtime
from baton.worker.ranks.channel import CollectiveError


class PeerCommunicator:
    """A `Communicator`. What a call gives that has waited in vain for a rank is wrong; `check` shows it."""

    def __init__(self, shard: Shard, store: Any, seconds: float, device: torch.device) -> None:
        """`store`: torch's, where all ranks meet within its own time limit; `seconds`: so long a call waits
        for the others. Blocks. Raises CollectiveError."""
        from baton.layers.kernels.all_reduce import AllReduce, buffer_bytes

        self._rank, self._ranks = shard.rank, shard.size
        self._store = store  # torch's file store opens its file again when it is destroyed
        buffer = torch.zeros(buffer_bytes(shard.size), dtype=torch.uint8, device=device)
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._failed = self._told.numpy()
        torch.cuda.synchronize(device)
        try:
            cuda_runtime.use(device)
            handle, offset = cuda_runtime.export_memory(buffer.data_ptr())
            store.set(f"exchange {shard.rank}", handle + offset.to_bytes(8, "little"))
            addresses = [buffer.data_ptr()] * shard.size
            for rank in range(shard.size):
                if rank != shard.rank:
                    told = bytes(store.get(f"exchange {rank}"))
                    handle, offset = (
                        told[: cuda_runtime.HANDLE_BYTES],
                        int.from_bytes(told[cuda_runtime.HANDLE_BYTES :], "little"),
                    )
                    addresses[rank] = cuda_runtime.open_memory(handle) + offset
        except (TransportError, RuntimeError) as error:
            raise CollectiveError(f"the ranks do not meet: {cuda_runtime.one_line(error)}") from error
        there = torch.tensor(addresses, device=device)
        self._exchange = AllReduce(shard.rank, buffer, there, self._told, seconds)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange.sum(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(len(x), 0 if self._rank else self._ranks * x.shape[1])
        self._exchange.gather(x, out)
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcasts integers."""
        if self._rank:
            x.zero_()
        return self.all_reduce(x)

    def add_norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> None:
        from baton.layers.kernels.gemm import add_norm

        if self._exchange.takes(*residual.shape):
            self._exchange.sum_norm(residual, parts, weight, out, eps, bias)
            return
        total = parts.sum(0) if bias is None else parts.sum(0) + bias
        total = self.all_reduce(total.to(residual.dtype).contiguous())
        add_norm(residual, total[None], weight, out, eps)

    def check(self) -> None:
        if self._failed[0]:
            raise CollectiveError(f"rank {self._rank} has waited in vain for another rank")
