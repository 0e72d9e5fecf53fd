"""Starts owners of pools, and local pools to pull into."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.transport.cuda_pages import CudaPages
from baton.v1 import common_pb2 as pb

UNTOUCHED = 0xEE


class Owner:
    """A `pool_owner.py` process; on the GPU of that index as this process numbers them."""

    def __init__(self, directory: Path, pages: int, page_bytes: int, *, gpu: int = 0, **variables) -> None:
        script = Path(__file__).with_name("pool_owner.py")
        incarnation = str(secrets.randbits(63))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = visible.split(",")[gpu] if visible else str(gpu)
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(directory), str(pages), str(page_bytes), incarnation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": own, **variables},
        )
        self.said = self._line()

    @property
    def endpoint(self) -> pb.CudaIpcEndpoint:
        return pb.CudaIpcEndpoint.FromString(bytes.fromhex(self.said))

    def ask(self, command: str) -> None:
        print(command, file=self.process.stdin, flush=True)
        assert self._line() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        return self.process.stdout.readline().strip()


@contextmanager
def owning(directory, pages, page_bytes, **options):
    owner = Owner(directory, pages, page_bytes, **options)
    try:
        yield owner
    finally:
        owner.kill()


def local_pool(pages: int, page_bytes: int) -> CudaPages:
    pool = torch.full((pages + 1, page_bytes), UNTOUCHED, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    return CudaPages(pool, pages)


def gpus() -> list:
    """GPUs for an owner beside a receiver on the first: the same one, and another where there is one."""
    other = pytest.param(
        1, id="two-gpus", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
    )
    return [pytest.param(0, id="one-gpu"), other]
