"""Each side of the hand-off against messages that the other would not send: the decode side's checks of what
is announced, and the prefill side's of who may say what."""

from __future__ import annotations

import pytest
from core_shell import Shell

from baton.config import DecodeConfig, PrefillConfig
from baton.engine.plan import RowResult, StepResult
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import PromptRoute, SchedulerConfig
from baton.handoff.lease import LeaseCounters
from baton.handoff.messages import (
    Alive,
    AttemptName,
    CancelPrefill,
    ChunkAnnounced,
    FirstSampled,
    GroupPages,
    LeaseFinished,
    PrefillFailed,
    ReleaseLease,
    StartPrefill,
    StartPull,
)
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_groups import FULL
from baton.tracing.recorder import EventKind, Recorder
from baton.worker.decode.remote_prefill import RemotePrefill
from baton.worker.decode.request_recording import RequestRecording
from baton.worker.decode.types import DecodeRequest, Key
from baton.worker.prefill.core import PrefillCore, PrefillCounters

NAME = AttemptName(7, 1, 0, 0)
PROMPT = tuple(range(10))
"""Three pages of four tokens."""


def make_scheduler(groups=(FULL,), **options):
    cache = KvCacheManager(PageAllocator(40), PrefixTree(4, groups=groups))
    hooks = {name: options.pop(name) for name in ("route", "abandon") if name in options}
    config = SchedulerConfig(context_length=100, token_budget=64, max_rows=8, output_margin=2, **options)
    return Scheduler(cache, config, **hooks)


def announced(*groups, first=0, last=True, step=0):
    """These pages of each KV group."""
    made = (GroupPages(first, tuple(pages), (1,) * len(pages)) for pages in groups)
    return ChunkAnnounced(NAME, tuple(made), last, step)


class Decode:
    """One prompt that has been asked for at p0."""

    def __init__(self, groups=(FULL,)):
        self.scheduler = make_scheduler(
            groups,
            route=lambda leader, uncached: PromptRoute.REMOTE,
            abandon=lambda leader: self.handoffs.abandon(leader),
        )
        self.request = EngineRequest(Key("caller", 1), PROMPT, SamplingParams(max_tokens=5))
        states = {self.request.key: DecodeRequest(self.request.key, 7, 0, self.request, ("p0",), 0)}
        config = DecodeConfig(handoff_seconds=9.0, pull_seconds=5.0)
        recording = RequestRecording(Recorder(0), states, {}, 0)
        self.handoffs = RemotePrefill(config, self.scheduler, states, recording)
        self.fetches = self.handoffs.fetches
        self.scheduler.submit(self.request)
        self.scheduler.plan()
        self.handoffs.begin(self.request.sequences[0], "p0", 0.0)
        assert isinstance(self.take()[0], StartPrefill)

    @property
    def failed(self):
        return list(self.fetches.counters.retries)

    def take(self):
        effects, self.fetches.effects = self.fetches.effects, []
        return effects

    def chunk(self, first=0, pages=(30, 31, 32), last=True, step=0, address="p0"):
        self.handoffs.receive(address, announced(pages, first=first, last=last, step=step), 1.0)
        return self.take()

    def first(self, tokens=((50, None),), cached=0):
        self.handoffs.receive("p0", FirstSampled(NAME, tokens, cached, ()), 1.0)
        return self.take()

    def pulled(self, effect, seen=True, generation=1):
        generations = [generation for _ in effect.pairs] if seen else None
        self.fetches.pull_ended(effect.pull, None, generations, 1.0)
        return self.take()


def test_pages_that_were_seen_to_be_right_need_no_answer():
    node = Decode()
    (pull,) = node.chunk()
    assert [source for source, _ in pull.pairs] == [30, 31, 32]
    node.first()
    assert node.pulled(pull) == [ReleaseLease("p0", NAME, awaited=False)]
    assert not node.fetches.running and node.request.sequences[0] in node.scheduler.running


@pytest.mark.parametrize(("reported", "asked"), [(False, 2), (True, None)])
def test_log_probabilities_of_a_prompt_are_asked_for_until_the_caller_has_them(reported, asked):
    node = Decode()
    node.handoffs.abandon(node.request.sequences[0])
    node.take()
    node.request.params = SamplingParams(prompt_logprobs=2)
    node.request.reported = reported
    node.handoffs.begin(node.request.sequences[0], "p0", 1.0)
    assert [effect.params.prompt_logprobs for effect in node.take()] == [asked]


def test_a_peer_has_cached_no_more_tokens_than_there_are():
    node = Decode()
    node.chunk()
    node.first(cached=1000)
    assert node.request.cached_tokens == len(PROMPT)


def test_one_pull_whose_generations_were_not_seen_makes_the_release_count():
    node = Decode()
    (pull,) = node.chunk(pages=(30,), last=False)
    node.chunk(first=1, pages=(31, 32))
    node.first()
    (second,) = node.pulled(pull, seen=False)
    assert node.pulled(second) == [ReleaseLease("p0", NAME, awaited=True)]
    assert node.fetches.running, "goes on before the lease is known to have stood"
    node.handoffs.receive("p0", LeaseFinished(NAME, stood=True), 2.0)
    assert not node.fetches.running and not node.failed


def test_a_pull_waits_for_the_latest_step_that_was_announced():
    node = Decode()
    (pull,) = node.chunk(pages=(30,), last=False, step=3)
    assert pull.step == 3
    node.chunk(first=1, pages=(31,), last=False, step=5)
    node.chunk(first=2, pages=(32,), step=0)
    (second,) = node.pulled(pull)
    assert isinstance(second, StartPull) and len(second.pairs) == 2 and second.step == 5


@pytest.mark.parametrize(
    "chunk",
    [
        {"first": 1, "pages": (31, 32)},  # early
        {"pages": (30, 31, 32, 33)},  # more than the prompt has
    ],
)
def test_pages_out_of_turn_are_not_taken(chunk):
    node = Decode()
    assert node.chunk(**chunk) == [CancelPrefill("p0", NAME)]
    assert node.failed == ["PROTOCOL"] and not node.fetches.running


@pytest.mark.parametrize("pages", [[(30, 31, 30)], [(30, 31), (31,)], [(30,), (), (31, 30)]])
def test_no_page_is_named_twice(pages):
    node, first, effects = Decode(), 0, []
    for each in pages:
        effects += node.chunk(first, each, last=first + len(each) == 3)
        first += len(each)
    assert node.failed == ["PROTOCOL"] and CancelPrefill("p0", NAME) in effects


def test_no_page_is_named_in_two_groups():
    node = Decode((FULL, FULL))
    node.handoffs.receive("p0", announced((30, 31, 32), (33, 31, 34)), 1.0)
    assert node.failed == ["PROTOCOL"]


@pytest.mark.parametrize("pages", [(33, 34, 35), (33, 34, 35, 36)])
def test_no_group_has_more_pages_than_the_prompt(pages):
    node = Decode((FULL, FULL))
    node.handoffs.receive("p0", announced((30, 31, 32), pages), 1.0)
    assert node.failed == (["PROTOCOL"] if len(pages) > 3 else [])


@pytest.mark.parametrize("again", [{"pages": (30,)}, {"first": 3, "pages": ()}])
def test_nothing_is_announced_after_the_last_page_or_twice(again):
    node = Decode()
    node.chunk()
    effects = node.chunk(**again)
    assert node.failed == ["PROTOCOL"] and CancelPrefill("p0", NAME) in effects


def test_fewer_pages_than_the_prompt_has_are_not_confirmed():
    node = Decode()
    (pull,) = node.chunk(pages=(30, 31))
    node.first()
    assert node.pulled(pull) == [CancelPrefill("p0", NAME)]
    assert node.failed == ["PROTOCOL"]


@pytest.mark.parametrize("tokens", [(), ((50, None), (51, None))])
def test_first_tokens_are_one_for_each_choice(tokens):
    node = Decode()
    node.first(tokens)
    assert node.failed == ["PROTOCOL"]


def test_first_tokens_come_once():
    node = Decode()
    node.first()
    node.first()
    assert node.failed == ["PROTOCOL"] and len(node.request.sequences[0].tokens) == len(PROMPT) + 1


def test_a_message_from_another_address_is_refused():
    node = Decode()
    assert node.chunk(address="p1") == [CancelPrefill("p1", NAME)]
    assert node.fetches.running and not node.failed and node.fetches.counters.unknown == 1
    node.handoffs.receive("p1", PrefillFailed(NAME, "ABORTED", "LEASE_EXPIRED", "not its own"), 1.0)
    assert node.fetches.running and not node.take()


def test_a_lease_that_ends_before_its_release_is_lost():
    node = Decode()
    node.chunk()
    node.handoffs.receive("p0", LeaseFinished(NAME, stood=True), 1.0)
    assert node.failed == ["LEASE_LOST"]
    assert CancelPrefill("p0", NAME) in node.take(), "its owner may hold the pages on"


def test_pages_with_other_generations_are_dropped():
    node = Decode()
    (pull,) = node.chunk()
    node.first()
    assert node.pulled(pull, generation=2) == [CancelPrefill("p0", NAME)]
    assert node.failed == ["STALE_PAGES"]


def make_prefill(max_leased_pages=30):
    own = make_scheduler()
    config = PrefillConfig(lease_grace_seconds=9.0, max_leased_fraction=max_leased_pages / 40)
    return PrefillCore(own.cache, own.config, config, Shell())


def computed(max_leased_pages=30):
    """A prefill core whose one prompt is complete and leased to "holder"."""
    core = make_prefill(max_leased_pages)
    core.leases.connect("holder", 0.0)
    core.start("holder", NAME, EngineRequest(NAME, PROMPT, SamplingParams()), True, 0.0)
    step = core.plan(1.0)
    rows = (RowResult((50,)),)
    core.commit(step, StepResult(step.plan.number, rows), 2.0)
    return core


def test_the_age_of_the_oldest_lease_is_reported():
    core = computed()
    other = NAME._replace(request=NAME.request + 1)
    core.start("holder", other, EngineRequest(other, PROMPT, SamplingParams()), True, 2.0)
    step = core.plan(2.5)
    core.commit(step, StepResult(step.plan.number, (RowResult((50,)),)), 4.0)
    assert core.leases.announced == 2 and core.leases.oldest(5.0) == 3.0
    core.leases.release("holder", NAME)
    assert core.leases.announced == 1 and core.leases.oldest(5.0) == 1.0


def test_what_is_leased_is_counted_until_it_ends():
    core = computed()
    assert core.leases.announced == 1 and core.leases.oldest(5.0) == 3.0
    assert core.leases._held == {"holder": 3}
    core.leases.release("holder", NAME)
    assert core.leases.announced == 0 and core.leases.oldest(7.0) == 0.0 and not core.leases._held
    assert core.leases.counters == LeaseCounters(finished=1)
    assert core.counters == PrefillCounters(prompt_tokens=len(PROMPT), output_tokens=1)
    assert core.scheduler.cache.counts().owned == 0


def complete(core, number, keep_pages=True, priority=0):
    """Another prompt of "holder", computed at time 2."""
    name = AttemptName(7, number, 0, 0)
    core.start(
        "holder", name, EngineRequest(name, PROMPT, SamplingParams(), priority=priority), keep_pages, 2.0
    )
    step = core.plan(2.0)
    core.commit(step, StepResult(step.plan.number, (RowResult((50,)),)), 2.0)
    return name


def test_pages_that_are_not_kept_are_not_announced():
    core = make_prefill()
    core.start("holder", NAME, EngineRequest(NAME, tuple(range(90)), SamplingParams()), False, 0.0)
    step = core.plan(1.0)
    assert step.plan.num_tokens == 64
    core.commit(step, StepResult(step.plan.number, (RowResult(()),)), 2.0)
    assert NAME in core.leases.running and not core.leases.outputs


def test_a_prefill_node_records_the_chunks_of_its_prompts():
    recorder = Recorder()
    core = PrefillCore(
        KvCacheManager(PageAllocator(40), PrefixTree(4)),
        SchedulerConfig(context_length=100, token_budget=64, max_rows=8),
        PrefillConfig(),
        Shell(),
        recorder=recorder,
    )
    complete(core, 2)
    told = {event.kind: (event.request, event.number, event.step) for event in recorder.all()}
    assert told[EventKind.CHUNK_BEGUN] == (2, len(PROMPT), 1) and told[EventKind.ANNOUNCED][:2] == (2, 3)


def test_a_holders_leases_count_together():
    core = computed(max_leased_pages=5)
    complete(core, 2)
    third = AttemptName(7, 3, 0, 0)
    request = EngineRequest(third, PROMPT, SamplingParams())
    core.start("holder", third, request, True, 2.0)
    assert core.leases._held == {"holder": 6} and not core.may_admit(request)
    core.leases.release("holder", NAME)
    assert core.leases._held == {"holder": 3} and core.may_admit(request)


def test_a_prompt_whose_pages_are_not_kept_ends_with_its_first_token():
    core = computed()
    core.leases.outputs.clear()
    name = complete(core, 2, keep_pages=False)
    assert [type(output) for _, output in core.leases.outputs] == [FirstSampled, LeaseFinished]
    assert name not in core.leases.running and core.leases.announced == 1


@pytest.mark.parametrize(("leased", "admitted"), [(2, False), (3, True)])
def test_a_holder_that_does_not_pull_gets_no_more_pages(leased, admitted):
    core = computed(leased)
    another = AttemptName(7, 2, 0, 0)
    request = EngineRequest(another, PROMPT, SamplingParams())
    core.start("holder", another, request, True, 2.0)
    assert core.may_admit(request) == admitted


def test_a_lease_lasts_for_its_grace_after_the_last_heartbeat():
    core = computed()
    core.leases.outputs.clear()
    core.leases.heartbeat("holder", 4.0)
    core.tick(12.9)
    assert core.leases.announced == 1
    core.tick(13.0)
    assert core.leases.announced == 0 and core.leases.counters.leases_expired == 1
    assert core.leases.outputs[-1][1].reason == "LEASE_EXPIRED"


def test_a_start_is_a_sign_of_life():
    """A holder sends heartbeats only while it has attempts here."""
    core = make_prefill()
    core.leases.connect("holder", 0.0)
    core.start("holder", NAME, EngineRequest(NAME, PROMPT, SamplingParams()), True, 100.0)
    core.tick(108.9)
    assert NAME in core.leases.running
    core.tick(109.0)
    assert NAME not in core.leases.running and core.leases.counters.leases_expired == 1


def test_only_its_holder_ends_an_attempt():
    core = make_prefill()
    core.leases.connect("holder", 0.0)
    core.start("holder", NAME, EngineRequest(NAME, PROMPT, SamplingParams()), True, 0.0)
    for speak in (core.cancel, core.leases.release):
        speak("stranger", NAME)
        ((to, failed),) = core.leases.outputs
        assert to == "stranger" and failed.reason == "UNKNOWN_ATTEMPT"
        core.leases.outputs.clear()
    assert NAME in core.leases.running and core.holds("holder")
    core.cancel("holder", NAME)
    assert [failed.reason for _, failed in core.leases.outputs] == ["CANCELLED"] and not core.holds("holder")
    core.leases.outputs.clear()
    core.leases.release("holder", NAME)  # crossed the end on the wire
    assert not core.leases.outputs


def pairs(outputs):
    return [(holder, output) for holder, several in outputs.items() for output in several]


@pytest.mark.parametrize("end", ["retires", "fails", "ends the node"])
def test_of_a_cancelled_prompt_its_step_decides_the_answer(end):
    core = make_prefill()
    for holder, number in ("holder", 1), ("gone", 2):
        core.leases.connect(holder, 0.0)
        name = AttemptName(7, number, 0, 0)
        core.start(holder, name, EngineRequest(name, PROMPT, SamplingParams()), True, 0.0)
    step = core.plan(1.0)
    first, second = (AttemptName(7, number, 0, 0) for number in (1, 2))
    core.cancel("holder", first)
    core.cancel("gone", second)
    assert core.requests == 0 and not core.leases.outputs and core.holds("holder")
    core.disconnect("gone")
    if end == "retires":
        core.commit(step, StepResult(step.plan.number, tuple(RowResult((50,)) for _ in step.records)), 2.0)
    elif end == "fails":
        core.fail_step(step, "no device")
    else:
        core.shell = Shell(lambda step, outputs, effects: core.leases.outputs.extend(pairs(outputs)))
        core.node_failed("an error has escaped")
    ((holder, failed),) = core.leases.outputs
    reasons = {"retires": "CANCELLED", "fails": "STEP_FAILED", "ends the node": "NODE_FAILED"}
    assert (holder, failed.name, failed.reason) == ("holder", first, reasons[end])
    if end != "ends the node":
        assert not core.holds("holder") and core.scheduler.cache.counts().owned == 0


def test_heartbeats_of_who_is_connected_are_answered():
    core = make_prefill()
    core.leases.connect("holder", 100.0)
    for speaker in ("holder", "stranger"):
        core.leases.heartbeat(speaker, 101.0)
    core.disconnect("holder")
    core.leases.heartbeat("holder", 103.0)
    assert core.leases.outputs == [("holder", Alive())]


def test_a_prompt_that_waits_for_pages_costs_the_idle_lease_of_the_lowest_priority():
    core = computed()
    names = {priority: complete(core, 2 + priority, priority=priority) for priority in (5, 0)}
    waiting = AttemptName(7, 99, 0, 0)
    core.start("holder", waiting, EngineRequest(waiting, PROMPT, SamplingParams()), True, 2.0)
    core.leases.outputs.clear()  # and no step takes it up
    for now, lost in (2.0, []), (3.9, []), (4.0, [names[0]]):  # the youngest of the lowest priority
        core.leases.heartbeat("holder", now)
        core.tick(now)
        failed = [output for _, output in core.leases.outputs if isinstance(output, PrefillFailed)]
        assert [(output.name, output.reason) for output in failed] == [(n, "LEASE_REVOKED") for n in lost]
    assert core.leases.counters.leases_revoked == 1 and {names[5], NAME} <= core.leases.running.keys()
