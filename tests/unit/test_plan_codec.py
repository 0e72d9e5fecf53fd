"""Plans as followers get them."""

from __future__ import annotations

import marshal
import pickle
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from baton.authentication.cluster import ClusterCredentials, ClusterTls
from baton.config import DecodeConfig, WorkerConfig
from baton.engine.image_spans import ImageSpan
from baton.engine.plan import PlanRow, Pooling, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.kvcache import NO_PAGE
from baton.layers.tensor_parallel import Shard
from baton.worker.ranks.channel import Channel, ChannelClosed, ChannelError
from baton.worker.ranks.messages import End, Failed, Loaded, MakePool, Meet, Message, Ready, Setup, Started
from baton.worker.ranks.plan_codec import PlanDecoder, PlanEncoder


def random_plan(rng, number, tables):
    """Rows of some slots, whose tables grow, lose pages of windows, or are another sequence's."""
    rows, inits = [], []
    for slot in rng.sample(range(8), rng.randrange(9)):
        if slot not in tables or rng.random() < 0.2:
            tables[slot] = [[rng.randrange(99)], [rng.randrange(99)]]
            last = rng.choice([None, 5])
            inits.append(SlotInit(slot, SamplingParams(seed=3), 3, (1, 2), (4,), last))
        for table in tables[slot]:
            table.extend(rng.randrange(99) for _ in range(rng.randrange(3)))
        if rng.random() < 0.3:
            tables[slot][1][0] = NO_PAGE
        row = PlanRow(slot, None, rng.randrange(500), tuple(map(tuple, tables[slot])), (slot,))
        if rng.random() < 0.4:
            row = replace(row, tokens=[7, 8, 9], sample=rng.choice([(), (slot,), (slot, 8)]))
            row.prompt_logprobs = rng.choice([None, (1, 2)])
            row.pooling = rng.choice([None, Pooling.LAST])
        elif rng.random() < 0.3:
            row.drafts, row.replay = rng.choice([((4, 5), 0), ((4, 5), 2), ((), 1)])
            row.ahead = rng.choice([0, 1])
        rows.append(row)
    return StepPlan(number, tuple(rows), tuple(inits), rng.choice([(), ((1, 2), (3, 4))]))


def expected(plan):
    """What a follower needs of it."""
    rows = tuple(
        replace(
            row,
            tokens=None if row.tokens is None else tuple(row.tokens),
            prompt_logprobs=None if row.prompt_logprobs is None else (0,) * len(row.prompt_logprobs),
        )
        for row in plan.rows
    )
    inits = [SlotInit(init.slot, SamplingParams(), 0, (), (), init.last_token) for init in plan.inits]
    return replace(plan, rows=rows, inits=tuple(init for init in inits if init.last_token is not None))


@pytest.mark.parametrize("seed", range(20))
def test_followers_get_rows_tables_and_last_tokens(seed):
    rng, tables = random.Random(seed), {}
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for number in range(40):
        plan = random_plan(rng, number, tables)
        assert decoder.decode(encoder.encode(plan)) == expected(plan)


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_go_on_are_those_of_the_plan_before(seed):
    """Each one token on: their tables grow, or lose pages; now and then others come between."""
    rng = random.Random(seed)
    tables = {slot: [list(range(slot, slot + 3)), [slot]] for slot in range(5)}
    encoder, decoder, order, start = PlanEncoder(), PlanDecoder(), list(tables), 0
    short = 0
    for number in range(60):
        start += 1 if rng.random() < 0.9 else 2
        for slot in order:
            if rng.random() < 0.2:
                tables[slot][rng.randrange(2)].append(rng.randrange(99))
            if rng.random() < 0.1:
                tables[slot][1][0] = NO_PAGE
        if rng.random() < 0.1:
            rng.shuffle(order)
        rows = [PlanRow(slot, None, start + slot, tuple(map(tuple, tables[slot])), (slot,)) for slot in order]
        if rng.random() < 0.1:
            rows[0].tokens = (9,)
        message = encoder.encode(StepPlan(number, tuple(rows)))
        short += len(message) < 40
        assert decoder.decode(message) == expected(StepPlan(number, tuple(rows)))
    assert short, "none was sent so"


def test_a_table_that_has_not_changed_is_not_sent_again():
    row = PlanRow(3, None, 70_000, (tuple(range(1000)),), (3,))
    encoder = PlanEncoder()
    first = encoder.encode(StepPlan(1, (row,)))
    assert len(first) > 1000 and len(encoder.encode(StepPlan(2, (row,)))) < 60
    longer = replace(row, tables=((*row.tables[0], 5),))
    assert len(encoder.encode(StepPlan(3, (longer,)))) < 80


@pytest.mark.parametrize("first", [{"tokens": (7, 8)}, {"tokens": (7,)}, {}])
def test_another_sequence_in_the_slot_has_tables_of_its_own(first):
    """Also equal ones: attention knows a row that goes on by its table. `first`: how the other begins."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    begun = SlotInit(3, SamplingParams(), 0, (), (), None if first else 5)
    row = PlanRow(3, None, 7, ((4,), (6,)), (3,))

    def followed(plan):
        return decoder.decode(encoder.encode(plan)).rows[0]

    before = followed(StepPlan(1, (row,)))
    tables = before.tables
    same = followed(StepPlan(2, (replace(row, start=8),)))
    assert same.tables is tables
    inits = () if first else (begun,)
    other = followed(StepPlan(3, (replace(row, start=9, **first),), inits))
    assert other.tables == tables
    assert all(new is not old for new, old in zip(other.tables, tables, strict=True))


@pytest.mark.parametrize("slots", [(3,), (2, 3)])
def test_another_sequence_in_the_slot_has_images_of_its_own(slots):
    """Also where it goes on at the position at which the one before would have."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    image = ImageSpan(2, 4, 6, b"")

    def followed(number, images, inits=()):
        rows = [PlanRow(slot, None, 30 + number, ((4, slot),), (slot,)) for slot in slots]
        rows[-1].images = images
        return decoder.decode(encoder.encode(StepPlan(number, tuple(rows), inits))).rows[-1].images

    begun = (SlotInit(3, SamplingParams(), 0, (), (), 5),)
    assert followed(1, (image,)) == followed(2, (image,)) == (image,)
    assert followed(3, (), begun) == followed(4, ()) == ()
    assert followed(5, (image,), begun) == followed(6, (image,)) == (image,)


def ends():
    ours, theirs = socket.socketpair()
    return Channel(ours, 5.0), Channel(theirs, 5.0)


CLUSTER = ClusterCredentials("secret", ClusterTls(b"ca", b"cert", b"key", "name"), secret_in_clear=True)
EVERY_MESSAGE = [
    Setup(Shard(1, 4, 2), None, 7, WorkerConfig(tp=4, master="a:1"), cluster=CLUSTER),
    Setup(Shard(1, 2), ("a", 1), 7, WorkerConfig(transports=("grpc",))),
    Started(),
    Meet(),
    Loaded("its name"),
    MakePool(3, 16, 64, "/dev/shm/pool"),
    MakePool(3, 16, 64, None, (2, 5), 7),
    Ready(1, "host", "cpu", 2**40, None, b"part"),
    End(),
    Failed("why"),
]


def test_messages_and_plans_arrive_in_order():
    ours, theirs = ends()
    for message in EVERY_MESSAGE:
        ours.send(message)
    ours.send_plan(b"one", 4)
    ours.send_plan(b"two", 1)
    assert [theirs.next() for _ in EVERY_MESSAGE] == EVERY_MESSAGE
    assert {type(message) for message in EVERY_MESSAGE} == set(get_args(Message))
    assert [theirs.next(), theirs.next()] == [(4, b"one"), (1, b"two")]
    theirs.send(Started())
    assert ours.receive(1.0) == Started()


def test_the_kind_of_node_does_not_matter_to_a_follower():
    ours, theirs = ends()
    ours.send(Setup(Shard(1, 2), "/a", 7, DecodeConfig(tp=2, prefill=("a:1",))))
    assert theirs.receive(1.0) == Setup(Shard(1, 2), "/a", 7, WorkerConfig(tp=2))


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "content",
    [
        *(bytes([2]) + pickle.dumps(each) for each in (Harmful(), Started())),
        bytes([2]) + msgspec.msgpack.encode({"type": "Ready", "pid": "no number"}),
        bytes([2]) + msgspec.msgpack.encode({"type": "Unknown"}),
        bytes([9]) + bytes(20),
        bytes([1]),
        b"",
    ],
    ids=["code", "pickle", "wrong type", "unknown", "kind", "short", "empty"],
)
def test_what_ranks_do_not_say_is_refused_and_never_executed(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 1.0)
    theirs.sendall(len(content).to_bytes(4, "little") + content)
    with theirs, pytest.raises(ChannelError):
        channel.next()
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "plan",
    [
        pickle.dumps(Harmful()),
        marshal.dumps((1, [], [], ())),
        msgspec.msgpack.encode((1, [("slot", 0, None, None)], [], [], [])),
        msgspec.msgpack.encode((1, [], [], [])),
    ],
    ids=["code", "marshal", "wrong type", "short"],
)
def test_a_plan_that_is_none_is_refused(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(msgspec.DecodeError):
        PlanDecoder().decode(plan)
    assert not Path("executed").exists()


def test_a_long_message_is_sent_while_another_comes():
    """Both sides' buffers are full."""
    ours, theirs = ends()
    long = bytes(2**23)
    with ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(each.send_bytes, long) for each in (ours, theirs)]
        assert [each.receive_bytes(5.0) == long for each in (ours, theirs)] == [True, True]
        assert [each.result(5.0) for each in sent] == [None, None]


def test_a_missing_plan_is_noticed():
    ours, theirs = ends()
    ours.send_plan(b"one", 1)
    assert theirs.next() == (1, b"one")
    ours._sent += 1
    ours.send_plan(b"three", 1)
    with pytest.raises(ChannelError, match="plan 3 came where 2 was expected"):
        theirs.next()


def test_silence_and_the_end_of_the_other_side_are_told_apart():
    ours, theirs = ends()
    with pytest.raises(ChannelError, match=r"has not answered for 0\.01 s"):
        ours.receive(0.01)
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)
    with pytest.raises(ChannelClosed):
        ours.send_plan(b"one", 1)


def test_a_side_that_takes_nothing_holds_up_the_other_for_a_limited_time():
    sockets = socket.socketpair()
    channel = Channel(sockets[0], 0.05)
    with pytest.raises(ChannelError, match="takes no messages"):
        for _ in range(1000):
            channel.send_plan(bytes(2**16), 1)


def test_the_rest_of_a_message_is_waited_for_no_longer_than_that():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 0.05)
    theirs.sendall(b"\x08\0\0\0half")  # 8 bytes are announced
    with theirs, pytest.raises(ChannelClosed):
        channel.receive(1.0)
