"""Nodes that are lost without a word: who is suspected, who has its turn, and who counts as the cause."""

from __future__ import annotations

from decode_node import Node
from test_attempts import LOST, A, B, attempts, placed

from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.gateway.resume import PROVEN_TOKENS, ResumeAttempts
from baton.grammar.base import GrammarSpec
from baton.rpc.errors import BatonError
from baton.v1 import decode_pb2
from baton.worker.decode.types import Key, TokensOutput, Turn


def lost(*made, turn=None):
    """Their node, while it computed `turn` as a suspect. Returns the reasons of those that end."""
    for each in made:
        each.has_turn = each is turn
    ResumeAttempts.node_lost(made)
    reasons = []
    for each in made:
        try:
            each.ended(LOST, 0.0, lost=True)
        except BatonError as error:
            reasons.append(error.reason)
        else:
            each.begin(B)
    return reasons


def running(count):
    made = [attempts() for _ in range(count)]
    for _, each in made:
        placed(each, [A, B])
    return made


def sent(made):
    start = decode_pb2.DecodeStart()
    made.fill(start)
    return start


def test_those_without_a_token_become_suspects():
    (_, new), (log, old) = running(2)
    log.choices[0].append([1], "")
    assert not lost(new, old)
    assert sent(new).suspect and not sent(old).suspect
    assert sent(new).failed_steps == sent(old).failed_steps == 0
    assert not lost(new, old)
    assert sent(old).suspect, "it has no token of its second attempt"


def test_the_cause_is_who_had_its_turn_at_two_nodes():
    (_, poison), (_, other) = running(2)
    assert not lost(poison, other)
    assert not lost(poison, other, turn=poison)
    assert not lost(poison, other), "nobody knows by whom"
    assert lost(poison, other, turn=poison) == ["REPEATED_STEP_FAILURE"]
    assert sent(other).failed_steps == 0


def test_what_a_suspect_ends_counts_against_no_other():
    (_, poison), (log, other) = running(2)
    other._policy = poison._policy.__class__(max_resumes=1, wait_seconds=10.0)
    log.choices[0].append([1], "")
    assert not lost(poison, other)
    assert not lost(poison, other, turn=poison)
    lost(poison, other, turn=poison)
    assert other.resumed == 3
    assert lost(other) == ["TOO_MANY_RESUMES"], "without a suspect it counts"


def test_tokens_clear_a_suspect():
    ((log, made),) = running(1)
    assert not lost(made) and not lost(made, turn=made)
    log.choices[0].append([1], "")
    assert not lost(made, turn=made), "one token is none by which a step ended"
    assert (made.failed_steps, made.suspect) == (1, True)
    log.choices[0].append([1] * PROVEN_TOKENS, "")
    assert not lost(made)
    assert (made.failed_steps, made.suspect) == (0, False)


def test_a_prompt_that_was_lost_with_its_prefill_node_is_a_suspect_elsewhere():
    ((_, made),) = running(1)
    error = BatonError(LOST.code, "PREFILL_LOST", "no prefill node could take the prompt")
    made.ended(error, 0.0, lost=False)
    assert made.suspect and made.resumed == 0


# --- at a decode node ---------------------------------------------------------------------------------------


def start(node, number, suspect=True, grammar=None, caller="caller", failed_steps=0):
    params = SamplingParams(max_tokens=4, seed=number, grammar=grammar)
    request = EngineRequest(
        Key(caller, number),
        tuple(range(8)),
        params,
        deadline=60.0,
        suspect=suspect,
        failed_steps=failed_steps,
    )
    node.core.start(request.key, 1, 0, request, (), node.now)
    return request


def turns(node):
    return [output.request for output in node.outputs if isinstance(output, Turn)]


def tokens(node):
    return {output.request for output in node.outputs if isinstance(output, TokensOutput)}


def begin(node, number):
    core = node.core
    return core.suspects.begin(core.unfinished.get(Key("caller", number)))


def test_one_suspect_is_computed_at_a_time_and_others_go_on():
    node = Node()
    for number in (1, 2, 3):
        start(node, number)
    start(node, 9, suspect=False)
    node.run(3)
    assert turns(node) == [1] and tokens(node) == {9}
    assert begin(node, 2) is None and begin(node, 7) is None
    assert begin(node, 1) is not None and begin(node, 1) is None
    node.run(2)
    assert turns(node) == [1, 2] and tokens(node) == {1, 9}
    node.core.cancel(Key("caller", 2))
    node.run(1)
    assert turns(node) == [1, 2, 3]
    begin(node, 3)
    node.run(8)
    assert tokens(node) == {1, 3, 9} and not node.core.unfinished
    node.core.cache.check(idle=True)


def test_a_suspect_is_in_no_step_with_a_request_that_was_in_a_failed_one():
    """Else a suspect that ends its node with a word makes the other one count as the cause."""
    node = Node()
    start(node, 1, failed_steps=1)
    start(node, 2)
    node.run(1)
    begin(node, 1)
    node.run(2)
    assert turns(node) == [1] and tokens(node) == {1}, "its first token does not clear it"
    node.run(4)
    assert turns(node) == [1, 2]
    start(node, 3, suspect=False, failed_steps=1)
    begin(node, 2)
    node.run(1)
    assert len(node.core.scheduler.running) == 1, "3 waits for the turn of 2"
    node.run(8)
    assert tokens(node) == {1, 2, 3}


def test_a_suspect_that_waits_may_end():
    node = Node()
    for number in (1, 2):
        start(node, number)
    node.run(1)
    node.core.cancel(Key("caller", 2))
    node.core.caller_gone("caller")
    node.run(1)
    assert turns(node) == [1] and not node.core.unfinished
    start(node, 3)
    node.run(1)
    assert turns(node) == [1, 3]


def test_a_suspect_begins_with_its_grammar():
    """Which is compiled in its turn: compiling may be what ends the node."""
    node = Node()
    request = start(node, 1, grammar=GrammarSpec("regex", "a"))
    node.run(1)
    assert turns(node) == [1]
    assert begin(node, 1) is request and request.blocked
    node.run(1)
    assert not tokens(node) and turns(node) == [1]


def test_a_suspect_without_room_has_no_turn():
    """It might wait for long, while its node is lost for another reason."""
    node = Node(max_rows=1)
    start(node, 9, suspect=False)
    node.run(1)
    start(node, 1)
    node.run(1)
    assert turns(node) == []
    node.run(6)
    assert turns(node) == [1]
