"""Both cores of the hand-off, real code, over a simulated wire that delays, reorders and breaks.

Prefill nodes and one decode node run the hash model of hash_runner: a page that is stale, foreign or not yet
written changes the output. Order is kept within a stream and random between streams, as on a network.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict, deque
from dataclasses import asdict, replace

import pytest
from core_shell import Shell
from hash_runner import HashRunner, reference

from baton.config import DecodeConfig, PrefillConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.grammar.base import GrammarError
from baton.handoff import messages
from baton.handoff.fetch import MAX_REASONS, FetchCounters
from baton.handoff.messages import (
    Alive,
    AttemptName,
    Beat,
    CancelPrefill,
    FirstSampled,
    LeaseFinished,
    PrefillFailed,
    ReleaseLease,
    StartPrefill,
    StartPull,
    StopPull,
)
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.page_map import PageUse
from baton.worker.decode.core import DecodeCore
from baton.worker.decode.types import DoneOutput, FailedOutput, Key, Peer, PromptOutput, TokensOutput
from baton.worker.prefill.core import PrefillCore

SIZE = 4
PULL = 5.0
"""Seconds that a pull may take."""


def make_scheduler(pages, **options):
    cache = KvCacheManager(PageAllocator(pages), PrefixTree(SIZE))
    hooks = {k: options.pop(k) for k in ("route", "abandon", "may_admit") if k in options}
    config = SchedulerConfig(context_length=pages * SIZE, **{"token_budget": 16, "max_rows": 8, **options})
    return Scheduler(cache, config, **hooks)


def make_prefill(pages=40, grace=9.0, leased=30):
    own = make_scheduler(pages)
    config = PrefillConfig(lease_grace_seconds=grace, max_leased_fraction=leased / pages)
    return PrefillCore(own.cache, own.config, config, Shell())


class PrefillNode:
    def __init__(self, address, pages, grace):
        self.core = make_prefill(pages, grace, int(pages * 0.8))
        self.runner = HashRunner(pages, SIZE, 8)
        self.address = address
        self.inbox, self.outbox = deque(), deque()
        self.up = False
        self.planned, self.retired = None, 0
        self.asked, self.said = [], []
        """Prompts that came (empty: refused), and messages that left."""

    def step(self, now):
        """Plans a step, or computes the one planned: anything may happen in between."""
        self.core.tick(now)
        if self.planned is None:
            self.planned = self.core.plan(now)
        else:
            step, self.planned = self.planned, None
            result = self.runner.read(self.runner.launch(step.plan))
            self.retired = step.plan.number
            self.core.commit(step, result, now)
        self.flush()

    def flush(self):
        outputs, self.core.leases.outputs = self.core.leases.outputs, []
        self.outbox.extend(output for _, output in outputs)
        self.said.extend(output for _, output in outputs)

    def check_counters(self):
        """Each attempt has ended once."""
        counters, prompts, said = self.core.leases.counters, self.core.counters, self.said
        reasons = Counter(output.reason for output in said if isinstance(output, PrefillFailed))
        firsts = [output for output in said if isinstance(output, FirstSampled)]
        assert counters.finished == sum(isinstance(output, LeaseFinished) for output in said)
        assert counters.leases_expired == reasons["LEASE_EXPIRED"]
        assert counters.leases_revoked == reasons["LEASE_REVOKED"]
        assert sum(asdict(counters).values()) == len(self.asked)
        assert prompts.prompt_tokens == sum(map(len, self.asked))
        assert prompts.output_tokens == sum(len(output.tokens) for output in firsts)
        assert prompts.cached_tokens >= sum(output.cached_tokens for output in firsts)


class World:
    """`visible`: the decode side sees the owner's generations (shm); else the release's answer must tell.
    `ahead`: it sees which steps have retired, too, and is told of pages before theirs has."""

    def __init__(
        self,
        rng,
        prefill_pages=(40, 40),
        decode_pages=40,
        visible=True,
        grace=1e9,
        silence=1e9,
        local=3,
        ahead=True,
    ):
        self.rng, self.visible, self.now = rng, visible, 0.0
        self.ahead = visible and ahead
        self.nodes = {f"p{i}": PrefillNode(f"p{i}", pages, grace) for i, pages in enumerate(prefill_pages)}
        config = DecodeConfig(
            local_prefill_tokens=local, fallback_tokens=1000, handoff_seconds=silence, pull_seconds=PULL
        )
        own = make_scheduler(decode_pages, output_margin=4, watermark=1)
        self.core = DecodeCore(own.cache, own.config, config, Shell(self.flushed))
        self.runner = HashRunner(decode_pages, SIZE, 8)
        self.pulls = []
        self.pressed = []
        """Whether what is flushed presses, each time that it is a release alone."""
        self.tokens = defaultdict(list)
        self.finished, self.terminal, self.prompts = set(), {}, defaultdict(int)
        self.asked, self.cached = [], 0
        for address in self.nodes:
            self.connect(address)

    def connect(self, address):
        node = self.nodes[address]
        node.up = True
        node.core.leases.connect("d", self.now)
        self.core.peer_changed(address, Peer(True, self.now, "shm"), "")

    def disconnect(self, address):
        node = self.nodes[address]
        node.up = False
        node.inbox.clear()
        node.outbox.clear()
        node.core.disconnect("d")
        node.core.leases.outputs.clear()
        for entry in [entry for entry in self.pulls if self.waits(entry) and entry[0].address == address]:
            self.pulls.remove(entry)
            self.core.fetches.pull_ended(entry[0].pull, "the receiver is closed", None, self.now)
        self.core.peer_changed(address, Peer(False, self.now), "lost")

    def start(
        self,
        number,
        prompt,
        max_tokens=6,
        seed=1,
        n=1,
        candidates=("p0", "p1"),
        deadline=1e9,
        stop=frozenset(),
        local=None,
    ):
        params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=stop)
        key = Key("gateway", number)
        request = EngineRequest(key=key, prompt=tuple(prompt), params=params, n=n, deadline=deadline)
        self.core.start(key, 77, 0, request, candidates, self.now, local)
        self.asked.append(prompt if key in self.core.unfinished else ())
        return request

    def flushed(self, step, outputs, effects):
        for _, output in outputs:
            if isinstance(output, TokensOutput):
                assert output.request not in self.terminal
                name = (output.request, output.choice)
                assert name not in self.finished, "a token after the last"
                self.tokens[name].append(output.token)
                if output.finish:
                    self.finished.add(name)
            elif isinstance(output, PromptOutput):
                self.prompts[output.request] += 1
                self.cached += output.cached_tokens
                assert not self.tokens[(output.request, 0)] and self.prompts[output.request] == 1
            else:
                assert output.request not in self.terminal, "two terminal events"
                self.terminal[output.request] = output
        for effect in effects:
            if isinstance(effect, StartPull):
                self.pulls.append([effect, None])
            elif isinstance(effect, StopPull):
                self.stop(effect)
            elif self.nodes[effect.address].up:
                self.nodes[effect.address].inbox.append(effect)

    def deliver(self, node):
        effect, core = node.inbox.popleft(), node.core
        if isinstance(effect, StartPrefill):
            request = EngineRequest(
                key=effect.name,
                prompt=effect.request.prompt,
                delivered=(effect.token_ids[len(effect.request.prompt) :],) if effect.delivered else (),
                params=effect.params,
                n=effect.n,
            )
            core.start("d", effect.name, request, True, self.now, self.ahead)
            node.asked.append(request.prompt if effect.name in core.leases.running else ())
        elif isinstance(effect, CancelPrefill):
            core.cancel("d", effect.name)
        elif isinstance(effect, ReleaseLease):
            core.leases.release("d", effect.name)
        elif isinstance(effect, Beat):
            core.leases.heartbeat("d", self.now)
        node.flush()

    def receive(self, node):
        message = node.outbox.popleft()
        self.core.fetches.note_alive(node.address, self.now)
        if not isinstance(message, Alive):
            self.core.handoffs.receive(node.address, message, self.now)

    def waits(self, entry):
        """For its step."""
        return entry[1] is None and entry[0].step > self.nodes[entry[0].address].retired

    def stop(self, stopped):
        """A copy that runs goes on."""
        for entry in [entry for entry in self.pulls if entry[0].pull == stopped.pull]:
            if self.waits(entry):
                self.pulls.remove(entry)
                self.core.fetches.pull_ended(stopped.pull, "interrupted", None, self.now)

    def pull(self, entry):
        """First call copies the bytes, second reads the generations: anything may happen in between."""
        effect, copied = entry
        node = self.nodes[effect.address]
        if copied is None:
            for source, target in effect.pairs:
                self.runner.pool[target] = list(node.runner.pool[source])
            entry[1] = True
            return
        self.pulls.remove(entry)
        cache = node.core.scheduler.cache
        generations = [cache.generation(source) for source, _ in effect.pairs] if self.visible else None
        self.core.fetches.pull_ended(effect.pull, None, generations, self.now)

    def decode_step(self):
        self.core.tick(self.now)
        step = self.core.plan(self.now)
        if [type(effect) for effect in self.core.fetches.effects] == [ReleaseLease]:
            self.pressed.append(self.core.pressing)
        self.core.flush(0)
        if step:
            self.core.commit(step, self.runner.read(self.runner.launch(step.plan)), self.now)
        self.core.flush(step.plan.number if step else 0)

    def turn(self):
        """One thing that could happen next, happens."""
        self.now += 0.01
        choices = [self.decode_step]
        for node in self.nodes.values():
            choices.append(lambda node=node: node.step(self.now))
            if node.inbox:
                choices.append(lambda node=node: self.deliver(node))
            if node.outbox:
                choices.append(lambda node=node: self.receive(node))
        choices.extend(lambda entry=entry: self.pull(entry) for entry in self.pulls if not self.waits(entry))
        self.rng.choice(choices)()

    @property
    def idle(self):
        nodes = self.nodes.values()
        busy = any(n.inbox or n.outbox or n.planned or n.core.requests for n in nodes)
        return not (self.core.unfinished or self.pulls or busy)

    def run(self, limit=30000):
        for _ in range(limit):
            if self.idle:
                break
            self.turn()
        else:
            raise AssertionError(f"no end: {self.core.unfinished}")
        self.decode_step()
        for node in self.nodes.values():
            node.core.scheduler.cache.check(idle=True)
            assert node.core.scheduler.reservations.total == node.core.scheduler.slots.in_use == 0
        self.core.scheduler.cache.check(idle=True)
        assert self.core.scheduler.reservations.total == self.core.scheduler.slots.in_use == 0
        assert len(self.core.fetches.running) == len(self.core.fetches.pulls) == 0
        self.check_counters()
        for node in self.nodes.values():
            node.check_counters()

    def check_counters(self):
        counters = self.core.counters
        done = sum(isinstance(output, DoneOutput) for output in self.terminal.values())
        codes = Counter(output.code for output in self.terminal.values() if isinstance(output, FailedOutput))
        assert counters.finished == done
        assert counters.failed == codes.total() - codes["CANCELLED"]
        assert counters.finished + counters.failed + counters.cancelled == len(self.asked)
        assert counters.prompt_tokens == sum(map(len, self.asked))
        assert counters.output_tokens == sum(map(len, self.tokens.values()))
        assert counters.cached_tokens == self.cached

    def check(self, request):
        number = request.key.request
        for i in range(request.n):
            expected = reference(list(request.prompt), request.params.seed + i, request.params.max_tokens)
            got = self.tokens[(number, i)]
            assert got == expected, (number, i)
        assert isinstance(self.terminal[number], DoneOutput), self.terminal[number]


def announced(world):
    """A request whose first pages are known here, and its prefill node, which has planned their step and not
    computed it. Nothing has been flushed since."""
    request, node = world.start(1, range(33)), world.nodes["p0"]
    world.decode_step()
    world.deliver(node)
    node.step(world.now)
    assert node.planned and not node.retired
    world.receive(node)
    return request, node


@pytest.mark.parametrize(("visible", "ahead"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("length", [5, 8, 33])
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_is_handed_off(visible, ahead, length, n):
    world = World(random.Random(1), visible=visible, ahead=ahead)
    request = world.start(1, range(length), n=n)
    world.run()
    world.check(request)
    stats = world.terminal[1].stats
    assert stats.prefill_address == "p0" and stats.pulled_pages == -(-length // SIZE)
    assert stats.transport == "shm" and stats.handoff_retries == 0
    assert sum(len(r.tokens) for p in world.runner.steps for r in p.rows if r.tokens) == 0


def test_pages_on_lease_and_under_a_copy_are_told_apart():
    world = World(random.Random(1))
    request, node = announced(world)
    world.core.flush(0)
    ((effect, _),) = world.pulls
    uses = world.core.page_uses()
    assert [page for page, use in enumerate(uses) if use == PageUse.PULLING] == sorted(
        target for _, target in effect.pairs
    )
    assert set(node.core.leases.pages()) == {source for source, _ in effect.pairs}
    world.run()
    world.check(request)
    assert not list(node.core.leases.pages())
    assert PageUse.PULLING not in world.core.page_uses()


def test_a_hand_off_does_not_wait_for_the_step_under_way():
    """Prompt, first token and pull, all without a plan on the decode node."""
    world = World(random.Random(1))
    request, node = world.start(1, range(33)), world.nodes["p0"]

    def between():
        world.core.admit(world.now)
        world.core.flush(0)

    between()
    assert [type(effect) for effect in node.inbox] == [StartPrefill]
    world.deliver(node)
    while not world.tokens[(1, 0)]:
        node.step(world.now)
        while node.outbox:
            world.receive(node)
        between()
    assert len(world.pulls) >= 1 and not world.runner.steps
    world.run()
    world.check(request)


ENDS = {
    "finished": None,
    "failed there": None,  # computed elsewhere then
    "refused there": None,
    "cancelled": "CANCELLED",
    "refused": "PROMPT_TOO_LONG",
    "failed": "STEP_FAILED",
    "expired": "DEADLINE_EXCEEDED",
}


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("end", [*ENDS, "caller gone"])
def test_an_ended_request_is_not_left_to_the_garbage_collector(end, n, monkeypatch):
    """It holds its prompt; and what is left to it are pauses in which no step is launched."""

    def alive():
        return {id(each) for each in gc.get_objects() if type(each) is EngineRequest}

    world = World(random.Random(1))
    cores = [node.core for node in world.nodes.values()]
    if end.startswith("failed"):
        failing = DecodeCore if end == "failed" else PrefillCore
        commit = failing.commit

        def fail(core, step, *rest):
            if core is cores[-1]:
                commit(core, step, *rest)
            else:
                core.fail_step(step, "as the test says")

        monkeypatch.setattr(failing, "commit", fail)
    if end == "refused there":
        for core in cores:
            core.scheduler.config = replace(core.scheduler.config, max_waiting=0)
    gc.collect()
    before = alive()
    gc.disable()
    try:
        for number in range(5):
            prompt = range(100 * number, 100 * number + (400 if end == "refused" else 33))
            deadline = world.now + 0.3 if end == "expired" else 1e9
            world.start(number, prompt, max_tokens=20, n=n, deadline=deadline)
            while not (world.tokens[(number, 0)] or number in world.terminal):
                world.turn()
            if end == "cancelled":
                world.core.cancel(Key("gateway", number))
            elif end == "caller gone":
                world.core.caller_gone("gateway")
        world.run()
        reasons = [getattr(terminal, "reason", None) for terminal in world.terminal.values()]
        assert reasons == ([] if end == "caller gone" else [ENDS[end]] * 5)
        assert world.core.counters.cancelled == (5 if end in ("cancelled", "caller gone") else 0)
        assert sum(core.leases.counters.failed for core in cores) >= (5 if "there" in end else 0)
        assert alive() <= before
    finally:
        gc.enable()


def test_nor_is_an_attempt_whose_name_is_in_use():
    core = make_prefill()
    name = AttemptName(gateway=7, request=1, attempt=0, decode_try=0)
    request = EngineRequest(key=name, prompt=tuple(range(9)), params=SamplingParams())
    core.start("a", name, request, True, 0.0)
    again = EngineRequest(key=name, prompt=tuple(range(9)), params=SamplingParams())
    core.start("b", name, again, True, 0.0)
    assert [output.reason for _, output in core.leases.outputs] == ["DUPLICATE_ATTEMPT"]
    assert not again.sequences, "they point back at it"
    assert request.sequences and core.scheduler.requests == {name: request}


@pytest.mark.parametrize(
    ("own", "said", "length", "here"),
    [
        *((None, 8, 8, True), (None, 8, 9, False), (None, 0, 1, False), (None, 2**32 - 1, 100, True)),
        *((None, None, 32, True), (None, None, 33, False)),
        *((3, 50, 40, False), (3, 0, 3, True), (0, 2**32 - 1, 5, False)),
    ],
)
def test_where_a_prompt_is_computed(own, said, length, here):
    """The node's own limit comes before the caller's, and that before the default."""
    world = World(random.Random(1), local=own)
    request = world.start(1, range(length), local=said)
    world.run()
    world.check(request)
    assert (world.terminal[1].stats.prefill_address == "") == here


def test_a_callers_limit_counts_what_is_not_cached_here():
    world = World(random.Random(1), local=None)
    first = world.start(1, range(40), local=0)
    world.run()
    second = world.start(2, [*range(40), *range(50, 60)], local=12)
    world.run()
    world.check(first)
    world.check(second)
    assert world.terminal[1].stats.prefill_address and not world.terminal[2].stats.prefill_address


def test_only_missing_pages_are_pulled():
    world = World(random.Random(1))
    first = world.start(1, range(40), max_tokens=1 + 1)
    world.run()
    second = world.start(2, [*range(40), *range(50, 60)])
    world.run()
    world.check(first)
    world.check(second)
    assert world.terminal[2].stats.pulled_pages == 3
    assert world.terminal[2].stats.cached_tokens == 40
    third = world.start(3, [*range(40), *range(60, 70)])
    world.run()
    world.check(third)
    assert world.terminal[3].stats.cached_tokens == 40 and world.core.counters.cached_tokens == 80


@pytest.mark.parametrize("seed", range(5))
def test_a_request_that_its_first_token_finishes_is_never_pulled(seed):
    world = World(random.Random(seed))
    requests = [world.start(1, range(40), max_tokens=1), world.start(2, range(50, 70), max_tokens=1, n=2)]
    world.run()
    for request in requests:
        world.check(request)
        assert world.terminal[request.key.request].stats.pulled_pages == 0
    assert world.core.fetches.pulls.begun == 0, "a pull was begun"


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_token_that_comes_first_begins_no_pull(seed):
    """Its prompt is a single chunk here: what earlier chunks announced may have been pulled by then."""
    world = World(random.Random(seed), ahead=False)
    prompt = list(range(12))
    first = reference(prompt, 1, 1)
    world.start(1, prompt, stop=frozenset(first))
    world.run()
    assert world.tokens[(1, 0)] == first and isinstance(world.terminal[1], DoneOutput)
    assert world.core.fetches.pulls.begun == 0, "a pull was begun"


def test_a_prompt_that_waits_in_a_long_queue_is_not_given_up():
    """Silence is the peer's, not the prompt's: its step thread answers heartbeats while others compute."""
    world = World(random.Random(1), prefill_pages=(40,), silence=5.0)
    node = world.nodes["p0"]
    node.core.leases._max_pages = -1  # nothing is admitted
    request = world.start(1, range(30), candidates=("p0",))
    for _ in range(400):
        world.now += 0.1
        world.turn()
    assert len(world.core.fetches.running) == 1 and not world.core.unfinished[request.key].retries
    node.core.leases._max_pages = 40
    world.run()
    world.check(request)
    assert world.terminal[1].stats.handoff_retries == 0


def test_a_peer_that_says_nothing_is_given_up():
    world = World(random.Random(1), silence=5.0)
    request = world.start(1, range(30))
    world.decode_step()
    world.nodes["p0"].inbox.clear()
    world.now += 6.0
    world.run()
    world.check(request)
    assert world.terminal[1].stats.handoff_retries == 1 and world.terminal[1].stats.prefill_address == "p1"


def test_a_prompt_that_waits_for_a_connection_holds_up_nobody():
    world = World(random.Random(1), prefill_pages=(40, 40))
    world.core.peers |= {"p9": Peer(False, world.now), "p8": Peer(False, world.now - 100.0)}
    waiting = world.start(1, range(30), candidates=("p9", "p8"))
    other = world.start(2, range(30), candidates=("p0",))
    while 2 not in world.terminal:
        world.turn()
        assert world.now < 1.9, "held up"
    assert 1 not in world.terminal
    world.core.cancel(waiting.key)
    world.run()
    world.check(other)
    assert not world.core.routing.chosen


def test_short_rest_is_prefilled_here():
    world = World(random.Random(1))
    request = world.start(1, range(3))
    world.run()
    world.check(request)
    assert world.terminal[1].stats.prefill_address == "" and world.core.scheduler.local_prompts == 1


def test_no_prefill_node_connected_means_local():
    world = World(random.Random(1))
    world.disconnect("p0")
    world.disconnect("p1")
    world.now = 100.0
    request = world.start(1, range(30))
    world.run()
    world.check(request)


def test_prompts_beyond_what_a_node_may_compute_instead_are_refused_with_the_reason():
    world = World(random.Random(1), decode_pages=80)
    world.core.routing.config = replace(world.core.routing.config, fallback_tokens=40)
    world.disconnect("p0")
    world.disconnect("p1")
    world.now = 100.0
    served = [world.start(number, range(100 * number, 100 * number + 30)) for number in (1, 2)]
    world.run()
    world.check(served[0])
    refused = world.terminal[2]
    assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "NO_PREFILL_NODE")
    assert "(none is connected)" in refused.message


@pytest.mark.parametrize(("most", "refused"), [(60, False), (59, True)])
def test_as_many_tokens_are_computed_instead_as_a_node_may(most, refused):
    world = World(random.Random(1), decode_pages=80)
    world.core.routing.config = replace(world.core.routing.config, fallback_tokens=most)
    world.disconnect("p0")
    world.disconnect("p1")
    world.now = 100.0
    for number in (1, 2):
        world.start(number, range(100 * number, 100 * number + 30))
    world.run()
    assert isinstance(world.terminal[2], FailedOutput) == refused


def test_pages_are_announced_before_their_step_has_retired_and_pulled_after():
    world = World(random.Random(1))
    request, node = announced(world)
    world.decode_step()
    ((effect, _),) = world.pulls
    assert effect.step == node.planned.plan.number and world.waits(world.pulls[0])
    assert len(effect.pairs) == 4  # of a step of 16 tokens
    world.now += 100 * PULL
    world.decode_step()
    assert not world.core.fetches.pulls.overdue  # waiting is no fault
    assert len(world.core.fetches.running) == 1
    world.run()
    world.check(request)
    assert world.terminal[1].stats.handoff_retries == 0


@pytest.mark.parametrize("visible", [True, False])
def test_a_release_that_nobody_waits_for_does_not_press(visible):
    world = World(random.Random(1), visible=visible)
    world.start(1, range(33))
    world.run()
    assert world.pressed == [not visible]


def test_cached_pages_are_announced_at_once():
    world = World(random.Random(1))
    first = world.start(1, range(20), candidates=("p0",))
    world.run()
    # Another decode node, that has nothing of it.
    node, name = world.nodes["p0"], AttemptName(1, 1, 0, 0)
    node.core.leases.connect("e", world.now)
    again = EngineRequest(key=name, prompt=(*range(20), 7), params=SamplingParams(max_tokens=1))
    node.core.start("e", name, again, True, world.now, ahead=True)
    node.step(world.now)
    cached, rest = node.outbox
    spans = [[(each.first, len(each.pages)) for each in chunk.groups] for chunk in (cached, rest)]
    assert spans == [[(0, 5)], [(5, 1)]]
    assert (cached.step, cached.last, rest.last) == (0, False, True)
    assert rest.step == node.planned.plan.number > node.retired
    world.check(first)


def test_a_pull_that_was_not_begun_is_not_when_its_node_is_lost():
    """The numbers of a new life's steps start again: it would wait for one that is long to come."""
    world = World(random.Random(1))
    request, _ = announced(world)
    world.disconnect("p0")  # in the same turn: nothing has been flushed since
    world.decode_step()
    assert not world.pulls and len(world.core.fetches.pulls) == 0
    world.run()
    world.check(request)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_pull_that_waits_does_not_outlive_its_hand_off(flushed):
    """The step may never end. Until the pull does, its pages are pinned."""
    world = World(random.Random(1))
    request, _ = announced(world)
    if flushed:
        world.decode_step()
        assert len(world.pulls) == 1 and world.core.fetches.expecting is False  # more chunks follow
    assert len(world.core.fetches.pulls) == 1
    world.core.cancel(request.key)
    world.decode_step()
    assert not world.pulls and len(world.core.fetches.pulls) == 0
    world.core.scheduler.cache.check(idle=True)


def test_a_copy_of_a_drafters_pages_is_another_though_its_number_is_the_same():
    """Its pool has numbers of its own. Pages into which a copy runs stay pinned when its hand-off ends."""
    world = World(random.Random(1))
    request, node = announced(world)
    world.decode_step()
    node.step(world.now)
    entry = world.pulls[0]
    world.pull(entry)
    fetches, drafts = world.core.fetches, StartPull("p0", entry[0].pull, (), drafts=True)
    fetches.effects.append(drafts)
    world.core.cancel(request.key)
    assert entry[0].pull in fetches.pulls.running, "its copy runs"
    assert drafts in fetches.effects and StopPull("p0", entry[0].pull) in fetches.effects
    fetches.effects.remove(drafts)
    world.run()


def test_nothing_turns_beside_a_prefill_node_on_the_same_gpu():
    """Two processes take turns on a GPU: one that turns for nothing slows the prompt that it waits for."""
    world = World(random.Random(1))
    node = world.nodes["p0"]
    world.start(1, range(5))
    world.decode_step()
    assert not world.core.expecting, "nothing is announced"
    world.deliver(node)
    node.step(world.now)
    world.receive(node)
    world.decode_step()
    assert world.pulls and world.core.expecting
    for up, shares_gpu in ((True, False), (False, True), (True, True)):
        world.core.peers["p1"] = Peer(up, world.now, "cuda_ipc", shares_gpu)
        assert world.core.expecting == (not (up and shares_gpu))


def test_a_pull_that_cannot_be_stopped_is_overdue():
    world = World(random.Random(1))
    request, _ = announced(world)
    world.decode_step()
    stuck = world.pulls.pop()
    world.core.cancel(request.key)
    world.decode_step()
    assert len(world.core.fetches.pulls) == 1 and not world.core.fetches.pulls.overdue
    world.now += PULL
    world.decode_step()
    assert world.core.fetches.pulls.overdue == ["p0"]
    assert world.core.scheduler.cache.counts().quarantined == len(stuck[0].pairs)
    world.core.fetches.pull_ended(stuck[0].pull, "interrupted", None, world.now)
    world.core.scheduler.cache.check(idle=True)


def test_pressure_does_not_wait_for_a_step_of_another_node():
    """The hand-off is retracted for its pages, which its waiting pull pins."""
    world = World(random.Random(1), decode_pages=13, prefill_pages=(40,))
    here = [world.start(number, range(100 * number, 100 * number + 3), 26 - 3) for number in (1, 2)]
    for _ in range(3):
        world.decode_step()
    there = world.start(3, range(300, 317), 2, candidates=("p0",))
    world.decode_step()
    node = world.nodes["p0"]
    while node.inbox:
        world.deliver(node)
    node.step(world.now)  # planned, and not computed: it hangs
    while node.outbox:
        world.receive(node)
    for _ in range(100):
        world.now += 0.01
        world.decode_step()
    for request in here:
        world.check(request)
    world.run()
    world.check(there)


def test_a_peer_that_invents_reasons_adds_to_one_count():
    counters = FetchCounters()
    for number in range(100):
        counters.count_retry("STALE_PAGES")
        counters.count_retry(f"REASON_{number}")
    assert len(counters.retries) == MAX_REASONS + 1 and sum(counters.retries.values()) == 200
    assert counters.retries["STALE_PAGES"] == 100 and counters.retries["OTHER"] == 100 - MAX_REASONS + 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pull_that_never_ends_fails_its_try_and_its_pages_come_back_when_it_does(ahead):
    """Where it may have waited for its step, its time counts from the first token on."""
    world = World(random.Random(5), ahead=ahead)
    request = world.start(1, range(30))
    while not world.pulls:
        world.turn()
    stuck = world.pulls.pop()
    while ahead and not world.tokens[(1, 0)]:
        world.turn()
    assert world.core.scheduler.cache.counts().quarantined == 0
    world.now += PULL
    world.decode_step()
    counts = world.core.scheduler.cache.counts()
    assert counts.quarantined == len(stuck[0].pairs) > 0
    assert world.core.fetches.pulls.overdue == [stuck[0].address]
    # It goes on elsewhere, and so does a new one: not at the node out of whose pool the copy still runs.
    second = world.start(2, range(50, 80))
    for _ in range(30000):
        if {1, 2} <= world.terminal.keys():
            break
        world.turn()
        assert all(effect.address != stuck[0].address for effect, _ in world.pulls)
    world.check(request)
    world.check(second)
    assert [world.terminal[number].stats.handoff_retries for number in (1, 2)] == [1, 0]
    # The destinations belong to nobody else until the transport has said that nothing writes them.
    assert world.core.scheduler.cache.counts().quarantined == counts.quarantined
    world.pulls.append(stuck)
    world.run()
    assert world.core.scheduler.cache.counts().quarantined == 0
    assert world.core.fetches.pulls.overdue == []


def test_a_paused_request_gets_no_tokens_and_goes_on_where_it_was():
    world = World(random.Random(3))
    request, other = world.start(1, range(30), max_tokens=40), world.start(2, range(50, 80), max_tokens=40)
    while len(world.tokens[(1, 0)]) < 5:
        world.turn()
    world.core.pause(request.key, True)
    assert world.core.paused == 1
    said = len(world.tokens[(1, 0)])
    while 2 not in world.terminal:
        world.turn()
    assert len(world.tokens[(1, 0)]) == said
    world.core.pause(request.key, False)
    world.run()
    world.check(request)
    world.check(other)


def test_counters_count_what_happens():
    world = World(random.Random(2), prefill_pages=(40,), visible=False)
    for number in range(1, 9):
        world.start(
            number, range(40 * number, 40 * number + 9 + number), n=1 + number % 2, candidates=("p0",)
        )
    node = world.nodes["p0"]
    cancelled = 0
    for _ in range(4000):
        world.turn()
        if cancelled < 3 and len(node.asked) > 2 * cancelled + 1:
            world.core.cancel(Key("gateway", 2 * cancelled + 2))
            cancelled += 1
    world.run()
    ends = Counter(type(output) for output in world.terminal.values())
    assert ends == {DoneOutput: 5, FailedOutput: 3} and node.core.leases.counters.cancelled >= 2
    pulled = sum(end.stats.pulled_pages for end in world.terminal.values() if isinstance(end, DoneOutput))
    assert world.core.fetches.counters.pulled_pages >= pulled > 15


def test_a_name_that_has_ended_is_refused_and_what_is_said_of_it_is_no_longer_counted():
    world = World(random.Random(1))
    request, _ = announced(world)
    handoffs, fetches = world.core.handoffs, world.core.fetches
    before, ((name, fetch),) = fetches.counters.unknown, fetches.running.items()
    address = fetch.address
    for number in range(2):
        handoffs.receive(address, FirstSampled(name._replace(request=50 + number), (), 0, ()), world.now)
    assert fetches.counters.unknown == before + 2
    assert [e.name.request for e in fetches.effects if isinstance(e, CancelPrefill)] == [50, 51]
    handoffs.receive(address, LeaseFinished(name._replace(request=52), stood=True), world.now)
    assert len([e for e in fetches.effects if isinstance(e, CancelPrefill)]) == 2, "it has ended anyway"
    fetches.effects = [e for e in fetches.effects if not isinstance(e, CancelPrefill)]
    fetches.pull_ended(99, None, None, world.now)  # no pull of ours
    world.run()
    world.check(request)
    world.disconnect("p0")
    assert not fetches._last_seen.get("p0"), "nothing of it stays"


def test_a_grammar_of_another_attempt_of_that_name_is_dropped():
    core = make_prefill()
    name = AttemptName(gateway=7, request=1, attempt=0, decode_try=0)
    old, new = (EngineRequest(key=name, prompt=tuple(range(9)), params=SamplingParams()) for _ in range(2))
    core.start("a", name, old, True, 0.0)
    core.cancel("a", name)
    core.start("a", name, new, True, 0.0)
    grammar = object()
    core.compiled(name, old, GrammarError("too complex"))
    assert name in core.leases.running and new.grammar is None
    core.compiled(name, new, grammar)
    assert new.grammar is grammar


def test_the_last_failure_is_said_where_no_prefill_node_is_left():
    world = World(random.Random(1), decode_pages=80, silence=5.0)
    world.core.routing.config = replace(world.core.routing.config, fallback_tokens=10)
    for number in (1, 2):
        world.start(number, range(100 * number, 100 * number + 30), candidates=("p0",))
    world.decode_step()
    world.nodes["p0"].inbox.clear()
    world.now += 6.0
    world.run()
    refused = [output for output in world.terminal.values() if isinstance(output, FailedOutput)]
    assert len(refused) == 1 and "p0: SILENT: nothing heard for 5 s" in refused[0].message


def noted(recorder, notes):
    """Kind, number, step, and bytes and text where there are any."""

    def add(kind, gateway, request, attempt=0, decode_try=0, number=0, size=0, step=0, text=""):
        notes.append((kind.name, number, step, *filter(None, (size, text))))

    recorder.add = add


def test_what_is_recorded_of_a_hand_off():
    world = World(random.Random(1))
    core, here, there = world.nodes["p0"].core, [], []
    noted(world.core.recorder, here)
    noted(core.leases._recorder, there)
    object.__setattr__(world.core.recording, "page_bytes", 64)
    world.start(1, range(33), n=2, max_tokens=20)
    world.run()
    assert there == [
        ("QUEUED", 33, 0),
        ("ADMITTED", 0, 0),
        *(("CHUNK_BEGUN", 16, 1), ("ANNOUNCED", 4, 1), ("CHUNK_ENDED", 0, 1)),
        *(("CHUNK_BEGUN", 16, 2), ("ANNOUNCED", 4, 2), ("CHUNK_ENDED", 0, 2)),
        *(("CHUNK_BEGUN", 1, 3), ("ANNOUNCED", 1, 3), ("CHUNK_ENDED", 0, 3)),
        ("FIRST_TOKEN", 0, 0),
        ("ENDED", 0, 0, "released"),
    ]
    pulls = [each for each in here if each[0].startswith("PULL")]
    assert pulls == [
        *(("PULL_BEGUN", 4, 1, "p0"), ("PULL_ENDED", 4, 0, 256, "shm")),
        *(("PULL_BEGUN", 4, 2, "p0"), ("PULL_ENDED", 4, 0, 256, "shm")),
        *(("PULL_BEGUN", 1, 3, "p0"), ("PULL_ENDED", 1, 0, 64, "shm")),
    ]
    assert [each for each in here if each not in pulls] == [
        ("QUEUED", 33, 0),
        ("ADMITTED", 0, 0),
        ("SENT", 0, 0, "p0"),
        ("FIRST_TOKEN", 0, 0),
        ("RUNNING", 0, 0),
        *(("TOKENS", 16, 0), ("TOKENS", 32, 0)),
        ("ENDED", 40, 0, "finished"),
    ]


@pytest.mark.parametrize(
    ("why", "ended", "told"),
    [("refused", "PROMPT_TOO_LONG", 1), ("cancelled", "cancelled", 1), ("lost", "cancelled", 0)],
)
def test_what_is_recorded_of_other_ends(why, ended, told):
    core, notes = make_prefill(), []
    noted(core.leases._recorder, notes)
    name = AttemptName(gateway=7, request=1, attempt=0, decode_try=0)
    length = 9 if why != "refused" else 400
    core.start(
        "a", name, EngineRequest(key=name, prompt=tuple(range(length)), params=SamplingParams()), True, 0.0
    )
    if why == "cancelled":
        core.cancel("a", name)
    elif why == "lost":
        core.disconnect("a")
    assert notes[-1] == ("ENDED", 0, 0, ended)
    assert len(core.leases.outputs) == told and not core.requests and not core.holds("a")


@pytest.mark.parametrize(
    ("deadline", "last", "end", "reason"),
    [
        (5.0, 4.75, 5.0, "DEADLINE_EXCEEDED"),
        (1e9, 8.75, 9.0, "LEASE_EXPIRED"),
        (9.0, 8.75, 9.0, "DEADLINE_EXCEEDED"),
    ],
)
def test_a_lease_ends_with_its_grace_or_its_deadline(deadline, last, end, reason):
    core = make_prefill()
    name = AttemptName(gateway=7, request=1, attempt=0, decode_try=0)
    core.leases.connect("a", 0.0)
    request = EngineRequest(key=name, prompt=tuple(range(9)), params=SamplingParams(), deadline=deadline)
    core.start("a", name, request, True, 0.0)
    core.tick(last)
    assert core.requests == 1
    core.tick(end)
    assert [output.reason for _, output in core.leases.outputs] == [reason] and not core.requests
    counters = core.leases.counters
    assert (counters.leases_expired, counters.failed) == ((1, 0) if reason == "LEASE_EXPIRED" else (0, 1))
    core.leases.heartbeat("a", end)
    core.leases.heartbeat("b", end)
    assert [type(output) for _, output in core.leases.outputs[1:]] == [Alive], "nobody else is connected"


def test_a_heartbeat_goes_to_each_node_that_has_a_prompt_in_turn():
    world = World(random.Random(1), silence=2.0)
    fetches, world.now = world.core.fetches, 20.0
    for number, address in enumerate(("p1", "p0", "p0"), 1):
        world.start(number, range(100 * number, 100 * number + 20), candidates=(address,))
    world.core.admit(20.0)

    def beats(now):
        fetches.effects = []
        fetches.tick(now)
        return [effect.address for effect in fetches.effects if isinstance(effect, Beat)]

    assert [beats(now) for now in (20.0, 20.25, 20.5, 20.75, 21.0)] == [
        ["p0", "p1"],
        [],
        ["p0", "p1"],
        [],
        ["p0", "p1"],
    ]
    fetches.shorten_beat(0.5)
    assert [beats(now) for now in (21.5, 21.5625, 21.625)] == [["p0", "p1"], [], ["p0", "p1"]]
    fetches.note_alive("p0", 21.75)
    fetches.tick(22.0)
    assert len(fetches.running) == 3, "as long as may be"
    fetches.tick(22.25)
    assert [fetch.address for fetch in fetches.running.values()] == ["p0", "p0"]


def test_tries_are_counted_on_for_the_attempts_that_were_last(monkeypatch):
    monkeypatch.setattr(messages, "REMEMBERED_TRIES", 2)
    names, taken = messages.HandoffNames(), set()

    def tries(request, attempt=1):
        return names.next(7, request, attempt, taken.__contains__).decode_try

    assert [tries(1), tries(1), tries(2), tries(1), tries(1, attempt=2)] == [0, 1, 0, 2, 0]
    assert [tries(1), tries(2)] == [3, 0], "the one named longest ago is forgotten"
    taken.add(AttemptName(7, 2, 1, 1))
    assert tries(2) == 2


def test_a_prompt_that_finds_no_pages_here_is_asked_for_elsewhere():
    """Its node has announced more than was asked for, say."""
    world = World(random.Random(1))
    request, extend = world.start(1, range(30)), world.core.scheduler.extend
    answers = [False]
    world.core.scheduler.extend = lambda leader, rows: answers.pop() if answers else extend(leader, rows)
    world.run()
    world.check(request)
    assert world.core.fetches.counters.retries == {"NO_PAGES": 1}
    assert world.terminal[1].stats.handoff_retries == 1 and world.terminal[1].stats.prefill_address == "p1"


def test_the_time_in_each_phase_is_added_up():
    world = World(random.Random(1))
    state = world.core.unfinished[world.start(1, range(30)).key]
    state.phase, state.spent = "", {}
    for phase, now in (("a", 1.0), ("b", 3.0), ("a", 4.0), ("", 7.0), ("b", 9.0)):
        state.enter(phase, now)
    assert state.spent == {"a": 5.0, "b": 1.0} and (state.phase, state.since) == ("b", 9.0)
