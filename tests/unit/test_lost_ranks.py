"""A worker of several ranks ends with one of them: killed, stopped or failed."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.config import DecodeConfig
from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.rpc.errors import BatonError, failed_precondition
from baton.worker.decode.server import DecodeNode
from baton.worker.engine import build_engine, measure_steps
from baton.worker.ranks.channel import CollectiveError
from baton.worker.ranks.follower import Follower
from baton.worker.ranks.followers import Followers
from baton.worker.ranks.messages import End
from baton.worker.ranks.runner import RankedRunner, RanksLost

pytestmark = pytest.mark.thorough

INCARNATION = 0x7A9D51
SECONDS = 60.0


@pytest.fixture
def engine(monkeypatch):
    """Of two ranks; rank 0 waits 2 seconds for the other."""
    monkeypatch.setattr("baton.worker.ranks.leader.COLLECTIVE_SECONDS", 2.0)
    engine = build_engine(DecodeConfig(model="demo", tp=2, kv_tokens=1024), INCARNATION)
    started = time.monotonic()
    try:
        yield engine
    finally:
        engine.close()
        processes = engine.ranks.followers.processes.values()
        assert all(process.poll() is not None for process in processes), "a follower is left"
        assert time.monotonic() - started < SECONDS
        assert not segments(INCARNATION)


def segments(incarnation):
    """Files of a worker's shared memory."""
    return list(Path("/dev/shm").glob(f"baton-*{incarnation:016x}"))


def step(engine, number=1, page=0):
    inits = (SlotInit(0, SamplingParams(temperature=0.0), 0, (), ()),)
    row = PlanRow(0, (5, 6, 7), 0, ((page,),), (0,))
    return engine.runner.read(engine.runner.launch(StepPlan(number, (row,), inits)))


def test_killed(engine):
    assert step(engine).rows[0].error is None
    (follower,) = engine.ranks.followers.processes.values()
    lost = []
    engine.ranks.watch(lambda rank, code: lost.append((rank, code)))
    follower.kill()
    with pytest.raises(RanksLost) as caught:
        step(engine, 2)
    assert not engine.ranks.failed(caught.value), "no request is the cause"
    deadline = time.monotonic() + SECONDS
    while not lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lost == [(1, -signal.SIGKILL)]


def test_stopped(engine):
    (follower,) = engine.ranks.followers.processes.values()
    follower.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RanksLost, match="another rank is lost") as caught:
        step(engine)
    assert 1.0 < time.monotonic() - started < SECONDS
    assert not engine.ranks.failed(caught.value)


def test_failed_there(engine):
    """A plan that only the follower cannot execute."""
    encode = engine.runner._runner._encoder.encode
    engine.runner._runner._encoder.encode = lambda plan: encode(
        StepPlan(plan.number, (PlanRow(0, (5, 6, 7), 0, ((10**6,),), (0,)),))
    )
    with pytest.raises(RanksLost) as caught:
        step(engine)
    assert engine.ranks.failed(caught.value), "the step may be the cause"


def test_the_one_that_failed_may_be_the_last_to_end():
    """The others lose it when its sockets close, which is before it has ended."""
    for codes, blamed in ((("exit 3", "sleep 0.2; exit 1"), True), (("exit 3", "kill -9 $$"), False)):
        followers = Followers([], None)
        try:
            followers.processes |= {
                rank: subprocess.Popen(["sh", "-c", code]) for rank, code in enumerate(codes, 1)
            }
            assert followers.failed() is blamed
        finally:
            followers.close()


def test_a_plan_that_cannot_be_sent_ends_the_ranks():
    """What it says of page tables would be missing in all later messages."""
    runner = RankedRunner(SimpleNamespace(max_slots=1, vocab_size=1), [], lambda: 1)
    with pytest.raises(RanksLost) as caught:
        runner.launch(StepPlan(1, (PlanRow(0, (5,), 0, ((object(),),), (0,)),)))
    assert caught.value.by_step


def test_a_follower_that_has_waited_in_vain_launches_nothing_more():
    """What the collective gave is wrong, and would be written into pages."""
    launched, messages = [], iter([*[(torch.get_num_threads(), b"a plan")] * 2, End()])

    def check():
        if launched:
            raise CollectiveError("rank 1 has waited in vain for another rank")

    follower = object.__new__(Follower)  # a whole one has loaded a model and waits for rank 0
    follower._channel = SimpleNamespace(next=lambda: next(messages))
    follower._model = SimpleNamespace(communicator=SimpleNamespace(check=check))
    follower._decoder = SimpleNamespace(decode=lambda plan: plan)
    follower._runner = SimpleNamespace(launch=launched.append)
    with pytest.raises(CollectiveError):
        follower.run()
    assert launched == [b"a plan"]


def test_callers_are_told_before_a_lost_rank_ends_the_process(monkeypatch):
    """Two threads see that a rank has failed: the step thread, which tells callers, and the one that watches
    processes."""
    monkeypatch.setattr("baton.worker.node.LOST_SECONDS", 0.01)
    node, said = DecodeNode(DecodeConfig(model="demo")), []
    node.engine = SimpleNamespace(ranks=SimpleNamespace(failed=lambda error: True), failing=False)
    monkeypatch.setattr(node, "end_process", lambda: said.append("ended"))

    def tell(error):
        node._rank_lost(1, -signal.SIGKILL)  # meanwhile
        said.append("told")

    monkeypatch.setattr(node, "_tell_callers", tell)
    node._crashed(RanksLost("another rank is lost", by_step=True))
    assert said == ["told", "ended"]
    idle = DecodeNode(DecodeConfig(model="demo"))
    idle.engine = SimpleNamespace(failing=False)
    monkeypatch.setattr(idle, "end_process", lambda: said.append("ended"))
    idle._rank_lost(1, -signal.SIGKILL)
    assert said == ["told", "ended", "ended"], "without a step that fails, the loss itself ends it"


def test_ranks_that_are_lost_while_steps_are_measured_are_named(monkeypatch):
    def lost(runner, limits):
        raise RanksLost("another rank is lost", by_step=False)

    monkeypatch.setattr("baton.worker.engine.measure_step_cost", lost)
    monkeypatch.setattr("baton.worker.engine.step_limits", lambda engine: None)
    with pytest.raises(BatonError, match="another rank is lost"):
        measure_steps(SimpleNamespace(runner=None, device=torch.device("cpu"), config=DecodeConfig()))


async def test_a_node_that_cannot_start_leaves_no_ranks(monkeypatch):
    """Nor shared memory."""

    engines = []

    def lost(engine):
        engines.append(engine)
        raise failed_precondition("another rank is lost")

    monkeypatch.setattr("baton.worker.node.measure_steps", lost)
    node = DecodeNode(DecodeConfig(model="demo", tp=2, kv_tokens=1024))
    with pytest.raises(BatonError, match="another rank is lost"):
        await node.start("127.0.0.1:1")
    await node.stop()
    processes = engines[0].ranks.followers.processes.values()
    assert processes and all(process.poll() is not None for process in processes)
    assert not segments(node.incarnation)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tp": 7}, "cannot be divided among 7 ranks; use --tp with a divisor"),
        ({"device": "cpu", "decode_attention": "fa3"}, "attention backend 'fa3' does not work on cpu"),
        ({"transports": ("rdma",)}, "--transports: unknown transport 'rdma': use cuda_ipc, shm, nixl, grpc"),
    ],
)
def test_what_cannot_be_is_refused_before_other_ranks_are_started(monkeypatch, wrong, text):
    monkeypatch.setattr("baton.worker.engine.Ranks", lambda *_: pytest.fail("ranks are started"))
    config = replace(DecodeConfig(model="demo", tp=2, kv_tokens=1024), **wrong)
    with pytest.raises(BatonError, match=re.escape(text)):
        build_engine(config, INCARNATION)
