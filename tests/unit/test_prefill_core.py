"""A prefill node's core between its step loop and its shell."""

from __future__ import annotations

from core_shell import Shell
from hash_runner import HashRunner

from baton.config import PrefillConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler_config import SchedulerConfig
from baton.handoff.messages import AttemptName, ChunkAnnounced, FirstSampled, LeaseFinished, PrefillFailed
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.page_map import PageUse
from baton.worker.prefill.core import PrefillCore

LIMITS = SchedulerConfig(context_length=100, token_budget=16, max_rows=4)


class Node:
    def __init__(self):
        self.flushed, self.shell = [], Shell(self.send)
        cache = KvCacheManager(PageAllocator(40), PrefixTree(4))
        self.runner = HashRunner(40, 4, 4)
        self.core = PrefillCore(cache, LIMITS, PrefillConfig(), self.shell)

    def send(self, step, outputs, effects):
        self.flushed.append((len(self.shell.retired), outputs))

    def start(self, holder, number, length=20):
        name = AttemptName(gateway=7, request=number, attempt=0, decode_try=0)
        request = EngineRequest(key=name, prompt=tuple(range(length)), params=SamplingParams())
        self.core.leases.connect(holder, 0.0)
        self.core.start(holder, name, request, True, 0.0)
        return name

    def step(self):
        step = self.core.plan(1.0)
        self.core.commit(step, self.runner.read(self.runner.launch(step.plan)), 2.0)
        self.core.flush(step.plan.number)


def test_what_a_step_yields_goes_to_its_holders_after_the_step_is_published():
    node = Node()
    names = {holder: node.start(holder, number, 8) for number, holder in enumerate("ab")}
    assert node.core.requests == 2 and not node.core.expecting
    node.step()
    ((retired, by_holder),) = node.flushed
    assert retired == 1 and node.shell.retired == [1] and node.shell.observed == 1
    for holder, messages in by_holder.items():
        assert {message.name for message in messages} == {names[holder]}
        assert [type(message) for message in messages] == [FirstSampled, ChunkAnnounced]
    node.core.flush(0)
    assert len(node.flushed) == 1 and node.shell.observed == 2, "nothing is left to say"


def test_an_answer_to_a_heartbeat_is_an_empty_list_and_presses():
    node = Node()
    node.start("a", 1)
    node.core.plan(1.0)
    assert not node.core.pressing
    node.core.leases.heartbeat("a", 1.0)
    node.core.plan(1.0)
    assert node.core.pressing
    node.core.flush(0)
    assert node.flushed == [(0, {"a": []})]
    node.core.plan(1.0)
    assert not node.core.pressing


def test_leased_pages_are_told_apart():
    node = Node()
    name = node.start("a", 1)
    step = node.core.plan(1.0)
    assert PageUse.LEASED not in node.core.page_uses(), "nobody knows of them yet"
    node.core.commit(step, node.runner.read(node.runner.launch(step.plan)), 2.0)
    node.core.flush(1)
    node.step()
    uses = list(node.core.page_uses())
    leased = {
        page
        for _, by_holder in node.flushed
        for each in by_holder["a"]
        if isinstance(each, ChunkAnnounced)
        for group in each.groups
        for page in group.pages
    }
    assert len(leased) == 5 and {page for page, use in enumerate(uses) if use == PageUse.LEASED} == leased
    node.core.leases.release("a", name)
    assert PageUse.LEASED not in node.core.page_uses()


def test_a_stream_is_closed_when_its_attempts_have_ended():
    node, closed = Node(), []
    name = node.start("a", 1, 8)
    node.start("b", 2, 8)
    node.core.close_when_idle("a", lambda: closed.append("a"))
    node.step()
    assert not closed
    node.core.leases.release("a", name)
    node.core.flush(0)
    assert closed == ["a"] and isinstance(node.flushed[-1][1]["a"][0], LeaseFinished)
    node.core.flush(0)
    assert closed == ["a"], "once"


def test_a_node_that_fails_tells_who_is_being_computed_and_nothing_else():
    node = Node()
    node.start("a", 1, 8)
    node.step()
    node.flushed.clear()
    node.start("b", 2, 30)
    node.core.plan(1.0)
    node.core.leases.heartbeat("a", 1.0)
    node.core.node_failed("a bug")
    ((_, by_holder),) = node.flushed
    (failed,) = by_holder.pop("b")
    assert isinstance(failed, PrefillFailed) and not by_holder
    assert (failed.code, failed.reason, failed.message) == ("UNAVAILABLE", "NODE_FAILED", "a bug")


def test_steps_are_measured():
    node = Node()
    node.start("a", 1, 30)
    node.step()
    assert node.core.step_stats.prompt_rate.value == 16.0
    step = node.core.plan(3.0)
    node.core.fail_step(step, "it broke")
    node.core.flush(0)
    assert node.shell.retired == [1], "a step that has failed is never published"
    assert [each.reason for each in node.flushed[-1][1]["a"]] == ["STEP_FAILED"]
    assert node.core.step_stats.limit(0.5) == 0.5, "no step is in flight"
