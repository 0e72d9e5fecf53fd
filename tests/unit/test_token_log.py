"""The token log: every event once, in order, merged when the client is slow, one terminal event."""

import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.parsed_output import ParsedOutput
from baton.gateway.token_log import LOGPROBS_PER_DELTA, TokenLog
from baton.parsers.reader import ParsedCall, ParsedReasoning, ParsedText, Reader
from baton.parsers.registry import make_parser
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, inference_pb2

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def drain(log):
    events = []
    while more := log.take():
        events += more
    return events


def test_slow_client_gets_one_merged_delta():
    log = TokenLog("a")
    log.accept(inference_pb2.Accepted(seed=7))
    for token in range(1000):
        log.choices[0].append([token], "x")
    log.choices[0].append([1000], "!", finish_reason=LENGTH)
    log.finish(inference_pb2.Finished())
    events = drain(log)
    assert [event.WhichOneof("kind") for event in events] == ["accepted", "delta", "finished"]
    delta = events[1].delta
    assert list(delta.token_ids) == list(range(1001))
    assert delta.text == "x" * 1000 + "!"
    assert delta.finish_reason == LENGTH
    assert log.drained
    assert log.take() == []


def test_one_terminal_event():
    log = TokenLog("a")
    assert log.fail(status_pb2.Status(code=1))
    assert not log.finish(inference_pb2.Finished())
    assert not log.fail(status_pb2.Status(code=2))
    events = drain(log)
    assert [event.WhichOneof("kind") for event in events] == ["failed"]
    assert events[0].failed.code == 1


def test_finished_choice_takes_no_more():
    log = TokenLog("a")
    log.choices[0].append([1], "x", finish_reason=LENGTH)
    with pytest.raises(RuntimeError):
        log.choices[0].append([2], "y")


def test_stop_string_cuts_the_text_and_counts_the_token_that_completed_it():
    log = TokenLog("a", stop=["END"])
    choice = log.choices[0]
    choice.append([1], "one E")
    assert drain(log)[0].delta.text == "one "
    choice.append([2], "N")
    delta = drain(log)[0].delta
    assert (delta.text, list(delta.token_ids)) == ("", [2])  # held back, but its token is shown
    choice.append([3], "D two")
    delta = drain(log)[0].delta
    assert (delta.text, delta.stop_matched, delta.finish_reason) == ("", "END", STOP)
    assert choice.text == "one "
    assert log.output_tokens == 3


def test_a_call_that_a_stop_string_cuts_off_is_left_out():
    log = TokenLog("a", stop=["END"])
    choice = log.choices[0]
    parser = make_parser("hermes", "", {"f": ""}, opened=False)
    choice.begin(Vocabulary((), (), frozenset(), False, 0), [], ParsedOutput(parser, 0, ""))
    for token, text in enumerate(['Yes.\n<tool_call>{"name": "f", "argu', "ments", '": {"a": "EN', 'D"}}']):
        choice.append([token], text)
    (event,) = drain(log)
    assert (event.delta.text, len(event.delta.tool_calls), event.delta.finish_reason) == ("Yes.", 0, STOP)


def test_held_text_is_flushed_at_the_end():
    log = TokenLog("a", stop=["END"])
    log.choices[0].append([1], "EN", finish_reason=LENGTH)
    delta = drain(log)[0].delta
    assert (delta.text, delta.finish_reason, delta.stop_matched) == ("EN", LENGTH, "")


def test_no_stop_string_in_the_text_of_the_first_min_tokens():
    log = TokenLog("a", stop=["ab"], min_tokens=2)
    choice = log.choices[0]
    choice.append([1], "ab")
    choice.append([2], "a")
    choice.append([3], "b")  # the "a" was shown already: no match across this border
    assert not choice.finished
    choice.append([4], "ab")
    assert choice.stop_matched == "ab"
    assert choice.text == "abab"


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.booleans()), max_size=40))
def test_whenever_it_is_taken_nothing_is_lost_or_doubled(steps):
    log = TokenLog("a", n=3)
    expected = {0: ([], ""), 1: ([], ""), 2: ([], "")}
    events = []
    for token, (index, text, take) in enumerate(steps):
        log.choices[index].append([token], text)
        ids, whole = expected[index]
        expected[index] = ([*ids, token], whole + text)
        if take:
            events += log.take()
    for index in range(3):
        log.choices[index].append([], "", finish_reason=LENGTH)
    log.finish(inference_pb2.Finished())
    events += drain(log)
    for index, (ids, text) in expected.items():
        mine = [event.delta for event in events if event.HasField("delta") and event.delta.choice == index]
        assert [id for delta in mine for id in delta.token_ids] == ids
        assert "".join(delta.text for delta in mine) == text
        assert [bool(delta.finish_reason) for delta in mine] == [False] * (len(mine) - 1) + [True]
    assert events[-1].WhichOneof("kind") == "finished"


class Echo(ParsedOutput):
    """Letters are text, digits calls, and `?` is reasoning."""

    def __init__(self):
        super().__init__(Letters(), 0, "")


class Letters(Reader):
    SPECIAL = ()

    def run(self):
        while not self.ended:
            for letter in self.text[self.at :]:
                event = ParsedCall(letter, "{}") if letter.isdigit() else ParsedText(letter)
                self.events.append(ParsedReasoning("?") if letter == "?" else event)
            self.at = len(self.text)
            yield


def test_a_merged_delta_keeps_the_order_of_text_and_calls():
    vocabulary = Vocabulary((b"a",), (b"a",), frozenset(), False, 1)
    log = TokenLog("a")
    (choice,) = log.choices
    choice.begin(vocabulary, [], Echo())
    for letter in "?ab12c??3d":
        choice.append([0], letter)
    choice.append([0], "", finish_reason=STOP)
    log.finish(inference_pb2.Finished())
    events = drain(log)
    deltas = [event.delta for event in events[:-1]]
    found = [(d.reasoning, d.text, "".join(call.name for call in d.tool_calls)) for d in deltas]
    assert found == [("?", "ab", "12"), ("", "c", ""), ("??", "", "3"), ("", "d", "")]
    assert [bool(delta.finish_reason) for delta in deltas] == [False, False, False, True]
    assert sum(len(delta.token_ids) for delta in deltas) == 11
    assert events[-1].HasField("finished")


def test_prompt_logprobs_come_first_and_hold_back_the_rest():
    log = TokenLog("a", await_prompt_logprobs=True)
    log.choices[0].append([1], "x")
    assert log.take() == []
    log.set_prompt_logprobs([common_pb2.PositionLogprobs()] * 3)
    log.choices[0].append([2], "y")
    first = log.take()[0].delta
    assert len(first.prompt_logprobs) == 3 and first.text == "xy"
    log.choices[0].append([3], "z")
    assert not log.take()[0].delta.prompt_logprobs


def test_large_log_probabilities_come_in_pieces():
    log = TokenLog("a")
    count = 2 * LOGPROBS_PER_DELTA + 1
    entry = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=1, logprob=-1))
    log.choices[0].append([1] * count, "x" * count, [entry] * count, LENGTH)
    log.finish(inference_pb2.Finished())
    deltas = [event.delta for event in drain(log) if event.HasField("delta")]
    assert [len(delta.logprobs) for delta in deltas] == [LOGPROBS_PER_DELTA, LOGPROBS_PER_DELTA, 1]
    assert [bool(delta.finish_reason) for delta in deltas] == [False, False, True]


def test_without_token_ids_only_text_makes_a_delta():
    log = TokenLog("a", include_token_ids=False)
    log.choices[0].append([1], "")
    assert log.take() == []
    log.choices[0].append([2], "x")
    assert drain(log)[0].delta == inference_pb2.Delta(text="x")
    assert log.output_tokens == 2
