"""Embeddings' pages where shared memory is small, as in a container, or not asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import yaml
from structlog.testing import capture_logs

from baton.transport.shm import SegmentError
from baton.worker.pool import PublishedPool, byte_pool

COMPOSE = Path(__file__).resolve().parents[2] / "docker-compose.yaml"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm has no room."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def pool(*kinds: str) -> PublishedPool:
    rows, published = byte_pool(8, 4096, kinds, os.getpid(), "--embeddings-mib")
    assert rows.shape == (8, 4096)
    return published


def kinds_of(published: PublishedPool) -> list[str | None]:
    return [endpoint.WhichOneof("kind") for endpoint in published.endpoints()]


@pytest.mark.usefixtures("full")
def test_without_room_pages_travel_over_grpc_and_one_line_says_what_to_do() -> None:
    with capture_logs() as logged:
        published = pool("cuda_ipc", "shm", "grpc")
    assert kinds_of(published) == ["grpc"]
    published.close()
    (line,) = logged
    assert line["log_level"] == "warning" and "grpc" in line["event"]
    assert "lower --embeddings-mib, or enlarge it (in a container: --shm-size)" in line["error"]
    with pytest.raises(SegmentError, match="lower --embeddings-mib"):
        pool("shm")


def test_a_pool_that_nobody_could_read_is_refused() -> None:
    with pytest.raises(SegmentError, match="--transports must name shm or grpc"):
        pool("cuda_ipc")
    published = pool("shm")
    assert kinds_of(published) == ["shm"]
    published.close()


def test_all_workers_of_docker_compose_share_memory() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for role in ("prefill", "decode", "encode"):
        (shared,) = [each for each in services[role]["volumes"] if "/dev/shm" in str(each)]
        assert (shared["source"], shared["target"]) == ("pages", "/dev/shm")
