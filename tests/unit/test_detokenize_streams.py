"""Token streams of one call: bounded, and each fails by itself."""

from baton.rpc.errors import from_status
from baton.tokenizer.service import TokenStreams
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1.tokenizer_pb2 import DetokenizeItem, DetokenizeRequest

LETTERS = [bytes([byte]) for byte in b"abcdefgh"]
VOCABULARY = Vocabulary(LETTERS, LETTERS, frozenset(), False, 8)


def apply(streams, *items):
    outputs = streams.apply(DetokenizeRequest(items=items)).outputs
    return [from_status(o.error).reason if o.HasField("error") else o.text for o in outputs]


def test_open_streams_are_bounded_and_a_refused_one_harms_no_other():
    streams = TokenStreams(VOCABULARY, max_streams=2)
    items = [DetokenizeItem(id=number, token_ids=[number]) for number in range(3)]
    assert apply(streams, *items) == ["a", "b", "STREAMS"]
    assert apply(streams, DetokenizeItem(id=0, finish=True)) == [""]
    assert apply(streams, DetokenizeItem(id=3, token_ids=[3])) == ["d"]
    assert streams.open == 2


def test_the_memory_of_closed_streams_is_bounded():
    streams = TokenStreams(VOCABULARY, max_streams=2)
    for number in range(100):
        assert apply(streams, DetokenizeItem(id=number, token_ids=[0], finish=True)) == ["a"]
        assert apply(streams, DetokenizeItem(id=number, token_ids=[0])) == ["STREAM_CLOSED"]
    assert len(streams._closed) == 2
    assert streams.open == 0
    assert streams.counts.finished == 100


def test_nothing_of_a_bad_item_is_applied():
    streams = TokenStreams(VOCABULARY)
    assert apply(streams, DetokenizeItem(id=1, token_ids=[0, 8])) == ["INVALID_FIELD"]
    assert streams.counts.output_tokens == 0
    assert streams.open == 0


def test_two_items_of_one_stream_in_one_message_apply_in_order():
    streams = TokenStreams(VOCABULARY)
    assert apply(streams, DetokenizeItem(id=1, token_ids=[0]), DetokenizeItem(id=1, token_ids=[1])) == [
        "a",
        "b",
    ]


def test_a_stream_that_a_thread_opens_behind_the_end_of_its_call_is_no_load():
    """The thread of a long message goes on when its caller is gone."""
    streams = TokenStreams(VOCABULARY)
    apply(streams, DetokenizeItem(id=1, token_ids=[0]))
    streams.close()
    apply(streams, DetokenizeItem(id=2, token_ids=[0]))
    assert streams.counts.requests == 0 and streams.counts.cancelled == 1
