"""Deployments of real processes. After every test, every one that runs must hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_model, save
from deployment import Deployment
from forking import forks
from process import ENVIRONMENT, Process
from reference import Reference

import lanes

torch.set_num_threads(1)
Process.forked = True
lanes.others.append(
    forks(**ENVIRONMENT).seconds
)  # it imports while tests are collected, and serves all lanes


@pytest.fixture(scope="session")
def deployments() -> Iterator[list[Deployment]]:
    """Those that tests have started; they are looked at after each test."""
    running: list[Deployment] = []
    yield running
    left = [deployment for deployment in running if deployment.alive]
    for deployment in left:
        deployment.stop()
    assert not left, "a test has not stopped its deployment"


@pytest.fixture(autouse=True)
def idle_afterwards(deployments: list[Deployment]) -> Iterator[None]:
    yield
    for deployment in deployments:
        deployment.assert_idle()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A small checkpoint and what transformers makes of it."""
    model = make_model("qwen3")
    return save(model, tmp_path_factory.mktemp("qwen3")), Reference(model)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, deployments: list[Deployment]) -> Iterator[Deployment]:
    """The demo model, split. Whatever tests send, no process may log a traceback."""
    with Deployment.split(tmp_path_factory.mktemp("demo"), "demo") as deployment:
        deployments.append(deployment)
        yield deployment
        for process in deployment.processes:
            assert "Traceback" not in process.log.read_text(), process.log
