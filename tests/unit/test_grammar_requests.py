"""A request with a grammar waits until it is compiled; nobody else does, and every end is the usual one."""

from core_shell import Shell
from decode_node import Node

from baton.config import PrefillConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler_config import PromptRoute, SchedulerConfig
from baton.grammar.base import GrammarBusy, GrammarError, GrammarSpec
from baton.handoff.messages import AttemptName, PrefillFailed
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.rpc.validate import check_sampling
from baton.worker.convert import sampling_from
from baton.worker.decode.types import DoneOutput, FailedOutput, Key, Peer
from baton.worker.handoff_messages import sampling_to
from baton.worker.prefill.core import PrefillCore

SPEC = GrammarSpec("regex", "a+")


class Anything:
    """HashRunner knows no grammars: only the object's way is looked at."""


def start(node, number, grammar=SPEC, candidates=(), seconds=60.0):
    params = SamplingParams(max_tokens=4, seed=number, grammar=grammar)
    key = Key("caller", number)
    request = EngineRequest(key, tuple(range(8)), params, deadline=node.now + seconds)
    node.core.start(key, 1, 0, request, candidates, node.now)
    return key, request


def ends(node, number):
    return [o for o in node.outputs if o.request == number and isinstance(o, DoneOutput | FailedOutput)]


def test_it_waits_and_others_overtake():
    node = Node()
    key, request = start(node, 1)
    start(node, 2, None)
    node.run(10)
    assert not [o for o in node.outputs if o.request == 1]
    assert [type(end) for end in ends(node, 2)] == [DoneOutput]
    inits = []
    launch = node.runner.launch
    node.runner.launch = lambda plan: inits.extend(plan.inits) or launch(plan)
    grammar = Anything()
    node.core.compiled(key, request, grammar)
    node.run(10)
    assert [type(end) for end in ends(node, 1)] == [DoneOutput]
    assert {init.grammar for init in inits} == {grammar}
    node.core.scheduler.cache.check(idle=True)


def test_where_too_many_are_to_be_compiled_it_may_be_asked_again():
    node = Node()
    key, request = start(node, 1)
    node.core.compiled(key, request, GrammarBusy("128 others wait"))
    node.run(2)
    (end,) = ends(node, 1)
    assert (end.code, end.reason, end.retry_after_ms) == ("RESOURCE_EXHAUSTED", "GRAMMARS_BUSY", 1000)


def test_one_that_cannot_be_compiled_names_the_field():
    node = Node()
    key, request = start(node, 1)
    node.core.compiled(key, request, GrammarError("unclosed group"))
    node.run(2)
    (end,) = ends(node, 1)
    assert (end.code, end.reason, end.field) == ("INVALID_ARGUMENT", "INVALID_GRAMMAR", "sampling.grammar")
    assert "unclosed group" in end.message
    assert not node.core.unfinished
    assert not len(node.core.scheduler.waiting)


def test_a_caller_that_leaves_meanwhile_leaves_nothing():
    for outcome in (Anything(), GrammarError("no")):
        node = Node()
        key, request = start(node, 1)
        node.core.cancel(key)
        again = start(node, 1)[1]  # the same name, in use again
        node.core.compiled(key, request, outcome)
        node.run(5)
        assert [end.code for end in ends(node, 1)] == ["CANCELLED"]
        assert again.awaits_grammar
        node.core.caller_gone("caller")
        node.core.compiled(key, again, outcome)
        node.run(5)
        assert len(ends(node, 1)) == 1
        assert not node.core.unfinished
        assert not len(node.core.scheduler.waiting)


def test_its_deadline_passes_meanwhile():
    node = Node()
    start(node, 1, seconds=0.5)
    node.now = 1.0
    node.run(1)
    assert [end.code for end in ends(node, 1)] == ["DEADLINE_EXCEEDED"]


def test_prefill_nodes_that_would_ignore_it_are_passed_over():
    node = Node()
    for address, able in (("old:1", False), ("new:1", True)):
        node.core.peers[address] = Peer(up=True, since=0.0, grammars=able)
    key, request = start(node, 1, candidates=("old:1", "new:1"))
    node.core.compiled(key, request, Anything())
    free = start(node, 2, None, candidates=("old:1", "new:1"))[1]
    assert node.core._route(request.sequences[0], 100) is PromptRoute.REMOTE
    assert node.core.unfinished[key].address == "new:1"
    assert node.core._route(free.sequences[0], 100) is PromptRoute.REMOTE
    assert node.core.unfinished[Key("caller", 2)].address == "old:1"
    node.core.peers["new:1"] = Peer(up=False, since=-10.0)
    assert node.core._route(request.sequences[0], 100) is PromptRoute.LOCAL


def test_a_prefill_node_waits_likewise():
    cache = KvCacheManager(PageAllocator(40), PrefixTree(4))
    config = SchedulerConfig(context_length=64, token_budget=32, max_rows=4)
    core = PrefillCore(cache, config, PrefillConfig(lease_grace_seconds=10.0), Shell())
    names = [AttemptName(1, number, 0, 0) for number in range(3)]
    requests = [EngineRequest(name, (1, 2, 3), SamplingParams(grammar=SPEC)) for name in names]
    core.leases.connect("holder", 0.0)
    for name, request in zip(names, requests, strict=True):
        core.start("holder", name, request, True, 0.0)
    # The lease that would be revoked for a prompt that waits: not for one that waits for its grammar.
    for now in (0.0, 3.0, 6.0):
        core.tick(now)
    assert core.plan(0.0) is None
    core.compiled(names[0], requests[0], Anything())
    core.compiled(names[1], requests[1], GrammarError("no"))
    core.cancel("holder", names[2])
    core.compiled(names[2], requests[2], Anything())
    step = core.plan(0.0)
    assert [record.sequence.request for record in step.records] == [requests[0]]
    failed = [output for _, output in core.leases.outputs if isinstance(output, PrefillFailed)]
    assert [(f.name, f.reason) for f in failed] == [
        (names[1], "INVALID_GRAMMAR"),
        (names[2], "CANCELLED"),
    ]


def test_it_reaches_the_prefill_node_as_it_came():
    for spec in (
        SPEC,
        GrammarSpec("json_object"),
        GrammarSpec("json_schema", '{"b": 1, "a": 2}'),
        GrammarSpec("lark", "start: a"),
        GrammarSpec("choice", choices=("b", "a")),
    ):
        params = SamplingParams(grammar=spec, stop_token_ids=frozenset({3, 9}), max_tokens=5)
        message = sampling_to(params)
        check_sampling(message, 10, allow_stop=False)
        assert sampling_from(message, [3], 100) == params


def test_one_that_waits_for_its_grammar_delays_nobody():
    """Its vocabulary may be loading for a long time, and the rows are free meanwhile."""
    node = Node()
    node.start(9)
    node.run(110)  # a measure of how long requests take
    start(node, 1, seconds=1e4)
    start(node, 2, seconds=1e4)
    node.run(2)
    for number in range(10, 13):
        node.start(number, max_tokens=40, seconds=2.0)
    node.run(60)
    assert not node.refused
    assert [type(end) for end in ends(node, 12)] == [DoneOutput]
