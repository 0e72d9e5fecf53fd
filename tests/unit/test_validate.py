"""Values out of range are refused with the name of their field; values at the edge are not."""

import math

import grpc
import pytest

from baton.rpc.errors import BatonError
from baton.rpc.validate import check_choices, check_sampling, check_token_ids, require_grammars
from baton.v1 import common_pb2
from baton.v1.common_pb2 import SamplingParams
from baton.worker.convert import layout_difference

NAN, INF = math.nan, math.inf
BAD = {
    "temperature": [-1, -1e-9, 100.1, NAN, INF, -INF],
    "top_k": [-1, -(2**31)],
    "top_p": [0, -0.5, 1.001, 2, NAN, INF],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1, 10.5, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN, -INF],
    "max_tokens": [0, -1, 2**62],
    "min_tokens": [-1, 2**62],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
}
GOOD = {
    "temperature": [0, -0.0, 1e-30, 100],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-30, 1],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 1, 10],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "max_tokens": [1, 2**24],
    "min_tokens": [0, 5],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "seed": [0, 2**64 - 1],
}


def refused(params, vocab_size=100, **options):
    with pytest.raises(BatonError) as caught:
        check_sampling(params, vocab_size, **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason == "INVALID_FIELD"
    assert caught.value.field is not None
    assert caught.value.field in caught.value.message
    return caught.value.field


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_out_of_range(name, value):
    assert refused(SamplingParams(**{name: value})) == f"sampling.{name}"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]])
def test_at_the_edge(name, value):
    check_sampling(SamplingParams(**{name: value}), 100)


def test_every_scalar_field_is_covered():
    fields = SamplingParams.DESCRIPTOR.fields
    scalars = {f.name for f in fields if not f.is_repeated and f.message_type is None}
    assert scalars == {*GOOD, "ignore_eos"}


def test_nothing_given_is_fine():
    check_sampling(SamplingParams(), 100)


def test_stop():
    check_sampling(SamplingParams(stop=["a"] * 16), 100)
    assert refused(SamplingParams(stop=["a"] * 17)) == "sampling.stop"
    assert refused(SamplingParams(stop=["a", ""]), field="body") == "body.stop[1]"
    assert refused(SamplingParams(stop=["a"]), allow_stop=False) == "sampling.stop"


def test_token_ids():
    check_sampling(SamplingParams(stop_token_ids=[99], logit_bias={99: -100}), 100)
    check_sampling(SamplingParams(stop_token_ids=[10**6], logit_bias={10**6: 1}), None)
    assert refused(SamplingParams(stop_token_ids=[1, 100])) == "sampling.stop_token_ids[1]"
    assert refused(SamplingParams(stop_token_ids=[1] * 65)) == "sampling.stop_token_ids"
    assert refused(SamplingParams(logit_bias={5: 1, 100: 1})) == "sampling.logit_bias[100]"
    assert refused(SamplingParams(logit_bias={5: NAN})) == "sampling.logit_bias[5]"
    assert refused(SamplingParams(logit_bias={5: -100.5})) == "sampling.logit_bias[5]"
    assert refused(SamplingParams(logit_bias=dict.fromkeys(range(1025), 0.0)), 10**6) == "sampling.logit_bias"
    check_token_ids([0, 99], 100, "token_ids")
    with pytest.raises(BatonError, match=r"token_ids\[1\] is 100"):
        check_token_ids([0, 100], 100, "token_ids")
    with pytest.raises(BatonError, match=r"token_ids\[0\] is -1"):
        check_token_ids([-1], 100, "token_ids")


def test_min_tokens_beyond_max_tokens():
    check_sampling(SamplingParams(min_tokens=4, max_tokens=4), 100)
    assert refused(SamplingParams(min_tokens=5, max_tokens=4)) == "sampling.min_tokens"


def test_choices():
    check_choices(1)
    check_choices(16)
    for n in (0, 17):
        with pytest.raises(BatonError):
            check_choices(n)


def test_a_layout_that_differs_is_told_by_field():
    group = common_pb2.KvGroup(kind="attention", layers=4, bytes_per_token=256, dtype="float32")
    here = common_pb2.Layout(model_fingerprint="ab", page_size=16, groups=[group], version=1)
    there = common_pb2.Layout()
    there.CopyFrom(here)
    assert layout_difference(here, there) is None
    there.page_size = 128
    there.groups[0].dtype = "bfloat16"
    there.groups.append(group)
    text = layout_difference(here, there)
    assert text is not None and "page_size is 16 at the prefill node and 128 at the decode node" in text
    assert "dtype is float32 at the prefill node and bfloat16 at" in text
    assert "groups[1].layers is absent at the prefill node and 4 at" in text and "fingerprint" not in text


GRAMMAR = "sampling.grammar"


def grammar(**kind):
    return SamplingParams(grammar=common_pb2.Grammar(**kind))


def choice(*strings):
    return grammar(choice=common_pb2.StringChoice(strings=strings))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (grammar(), GRAMMAR),
        (grammar(json_schema=""), f"{GRAMMAR}.json_schema"),
        (grammar(regex=""), f"{GRAMMAR}.regex"),
        (grammar(regex="é" * (2**18 + 1)), f"{GRAMMAR}.regex"),
        (choice(), f"{GRAMMAR}.choice"),
        (choice("a", ""), f"{GRAMMAR}.choice"),
        (choice(*map(str, range(4097))), f"{GRAMMAR}.choice"),
        (choice("a" * 2**18, "b" * 2**18, "c"), f"{GRAMMAR}.choice"),
        (grammar(lark="\n".join(f"a{i}: b" for i in range(8193))), f"{GRAMMAR}.lark"),
        (grammar(lark="\n".join(f" _A{i}[lazy]: B" for i in range(513))), f"{GRAMMAR}.lark"),
    ],
)
def test_a_grammar_that_is_empty_or_too_large(params, field):
    assert refused(params) == field


def test_grammars_at_the_edge():
    for params in (
        grammar(json_object=common_pb2.JsonObject()),
        grammar(regex="é" * 2**18),
        choice(*map(str, range(4096))),
        grammar(lark="\n".join(f"a{i}: b" for i in range(8192)) + "\n|c\nA: " + ":" * 512),
    ):
        check_sampling(params, 100)


def test_a_grammar_ends_with_the_end_of_sequence():
    params = grammar(regex="a")
    params.ignore_eos = True
    assert refused(params) == "sampling.ignore_eos"


def test_no_grammar_where_output_cannot_be_constrained():
    require_grammars(SamplingParams(), False)
    require_grammars(grammar(regex="a"), True)
    with pytest.raises(BatonError, match="cannot be constrained") as caught:
        require_grammars(grammar(regex="a"), False)
    assert caught.value.field == GRAMMAR
