"""Endpoints that must not be opened, and pools that cannot be shared."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from owners import local_pool, owning
from pool_owner import page_content

from baton.transport import EndpointRefused, HostPages
from baton.transport.cuda_ipc import CudaIpcReceiver
from baton.v1 import common_pb2 as pb

PAGES = 40
MB = 2**20


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-baton-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"boot_id": "another"}, "another host"),
        ({"boot_id": ""}, "another host"),
        ({"page_bytes": 2 * MB}, "the peer's pages have"),
        ({"pid": os.getpid()}, "this very process"),
        ({"pid": os.getpid(), "pid_namespace": "pid:[1]"}, "in another PID namespace"),
        ({"handle": b"short"}, "cannot be mapped"),
        ({"num_pages": 10 * PAGES}, "cannot be mapped"),
        ({"offset": 2**40}, "cannot be mapped"),
        ({"handle": bytes(64)}, "cannot be mapped"),
    ],
)
async def test_what_cannot_be_opened_is_refused(directory, changes, refusal):
    with owning(directory, PAGES, MB) as owner:
        endpoint = owner.endpoint
        for name, value in changes.items():
            setattr(endpoint, name, value)
        pool = local_pool(PAGES, MB)
        with pytest.raises(EndpointRefused) as caught:
            await CudaIpcReceiver.open(endpoint, pool)
        assert refusal in str(caught.value)
        assert "\n" not in str(caught.value)
        print(caught.value)
        # A refused call leaves no error behind that the next one would report.
        assert float(torch.ones(8, device="cuda:0").sum()) == 8.0
        receiver = await CudaIpcReceiver.open(owner.endpoint, pool)
        await receiver.pull([(0, 0)])
        assert torch.equal(pool.pool[0], page_content(0, MB))
        await receiver.close()


async def test_a_pool_on_the_host_is_refused(directory):
    with owning(directory, PAGES, MB) as owner, pytest.raises(EndpointRefused) as caught:
        await CudaIpcReceiver.open(owner.endpoint, HostPages(memoryview(bytearray(4 * MB)), MB))
    assert "is not on a GPU" in str(caught.value)


async def test_generations_of_another_container_cannot_be_seen(directory):
    with owning(directory, PAGES, MB) as owner:
        endpoint = owner.endpoint
        endpoint.generations.host_id = "another"
        receiver = await CudaIpcReceiver.open(endpoint, local_pool(PAGES, MB))
        assert receiver.generations([0]) is None
        await receiver.close()


def test_a_pool_in_an_expandable_segment_is_refused_with_a_reason(directory):
    with owning(directory, PAGES, MB, PYTORCH_ALLOC_CONF="expandable_segments:True") as owner:
        if owner.said.startswith("error"):
            assert "expandable_segments" in owner.said
        else:
            pb.CudaIpcEndpoint.FromString(bytes.fromhex(owner.said))
            pytest.fail("an expandable segment has been exported")
