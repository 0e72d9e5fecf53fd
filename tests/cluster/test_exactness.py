"""Greedy output through all four processes equals transformers' generate(), whatever the route.

BATON_TEST_EXACTNESS=whole adds what takes too long for every run: all lengths and routes of all families,
and the architectures that transformers' code computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from asking import ask, greedy
from checkpoints import ARCHITECTURES, BY_TRANSFORMERS, MORE, make_model, save
from deployment import Deployment
from process import Process
from reference import Answer, Reference

from baton.layers.cache_spec import CacheSpec, ChunkedWindow, Full, SlidingWindow, State
from baton.worker.decode.core import LOCAL_PREFILL_TOKENS

WHOLE = os.environ.get("BATON_TEST_EXACTNESS") == "whole"
MODELS = [*ARCHITECTURES, *MORE, *BY_TRANSFORMERS] if WHOLE else list(ARCHITECTURES)
CACHE_KINDS = ("qwen3", "gemma3", "llama4", "mistral-window", "deepseek")
"""A family of each kind of KV cache, for `make test`: one group, several, chunks, one with a window, MLA."""
OUTPUT = 64
PAGE = 16
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 160, 300]
"""Around page borders, and more rows than the narrow workers have."""
if WHOLE:
    LENGTHS += [32, 63]
SOME_LENGTHS = [16, 33, 64, 65, 160, 300]
"""Of all models but one. The first four with their outputs need more pages than there are: retractions."""
WIDE_LENGTHS = [16, 65, 300]
"""Of models without narrow workers."""
_SMALL = [Full(), SlidingWindow(24)]
GROUPS: dict[str, list[CacheSpec]] = {
    "gemma3": [Full(), SlidingWindow(48), SlidingWindow(48)],
    "gemma4": [Full(), SlidingWindow(40), SlidingWindow(40)],
    "gpt-oss": [Full(), SlidingWindow(40), SlidingWindow(40)],
    "llama4": [Full(), ChunkedWindow(40), ChunkedWindow(40)],
    **{name: [Full(), State(((1,),))] for name in ("lfm2", "qwen3.5")},
    "mistral-window": [SlidingWindow(24)],
    **{f"transformers:{name}": _SMALL for name in ("cohere2", "exaone4", "gemma2", "gpt-oss")},
    "transformers:gemma3-images": _SMALL,
    "transformers:starcoder2": [SlidingWindow(24)],
}
"""KV groups; other models have one, which sees all."""
NARROW = ("--token-budget", "16", "--max-rows", "8", "--page-size", "16", "--transports", "grpc", "--overlap")
"""Chunks of one page at most, pages over gRPC, each step launched before the last one's tokens are read."""
TIGHT = ("--kv-tokens", "400", "--output-margin", "1", "--watermark", "0")
"""Pages for one of the long prompts at a time, none set aside for output: sequences are retracted."""
ROUNDS = 5

WIDE_ONLY = set() if WHOLE else {"llama", "mistral", "qwen2", "phi3", "mixtral", "qwen3-moe", "glm4-moe"}
"""Their KV groups are those of qwen3: the narrow workers would say nothing more."""


@dataclass
class Routes:
    """One model behind two gateways, or four."""

    deployment: Deployment
    groups: list[CacheSpec]
    """The KV groups."""
    answers: list[Answer]
    wide_split: Process
    wide_aggregated: Process
    wide: tuple[Process, Process]
    """Prefill and decode."""
    narrow: tuple[Process, ...]
    """Likewise; empty: there are none."""
    narrow_split: Process | None
    narrow_aggregated: Process | None


def params(names: list[str]) -> list:
    return [
        pytest.param(name, marks=[pytest.mark.main_path] if name in CACHE_KINDS else []) for name in names
    ]


@pytest.fixture(scope="module", params=params(MODELS))
def routes(request, tmp_path_factory, deployments) -> Iterator[Routes]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    lengths = LENGTHS if WHOLE or request.param == "qwen3" else SOME_LENGTHS
    lengths = WIDE_LENGTHS if request.param in WIDE_ONLY else lengths
    groups = GROUPS.get(request.param, [Full()])
    borders = [spec.window + more for spec in groups if spec.window for more in (0, PAGE)[: 1 + WHOLE]]
    lengths = sorted({*lengths, *(border + more for border in borders for more in (-1, 0, 1))})
    deployment = Deployment(folder, save(model, folder / "model"))
    code = ("--model-impl", "transformers" if request.param in BY_TRANSFORMERS else "auto")
    wide = (
        deployment.add_worker("prefill", "--kv-tokens", "8192", "--page-size", str(PAGE), *code),
        deployment.add_worker("decode", "--kv-tokens", "8192", "--page-size", str(PAGE), *code),
    )
    narrow = (
        ()
        if request.param in WIDE_ONLY
        else (
            deployment.add_worker("prefill", *NARROW, "--kv-tokens", "4096", *code),
            deployment.add_worker("decode", *NARROW, *TIGHT, *code, "--local-prefill-tokens", "1"),
        )
    )
    routes = Routes(
        deployment,
        groups,
        # In float32 transformers' own log-probabilities of the delta rule are more than 1e-4 off.
        Reference(model.double() if request.param == "qwen3.5" else model).answers(lengths, OUTPUT),
        deployment.add_gateway([wide[1]], [wide[0]]),
        deployment.add_gateway([wide[1]]),
        wide,
        narrow,
        deployment.add_gateway([narrow[1]], [narrow[0]]) if narrow else None,
        deployment.add_gateway([narrow[1]]) if narrow else None,
    )
    with deployment:
        deployments.append(deployment)
        yield routes


def handed_over(length: int, groups: list[CacheSpec]) -> int:
    """Pages that a decode node pulls for a prompt: of a window those that its last page border sees."""
    return sum(-(-length // PAGE) - spec.keeps(length, PAGE) for spec in groups)


async def answer_all(routes: Routes, gateway: Process, **options):
    """All prompts at once; fails unless each answer is the reference's."""
    requests = [greedy(answer.prompt, OUTPUT, **options) for answer in routes.answers]
    completions = await ask(gateway.address, requests)
    for answer, completion in zip(routes.answers, completions, strict=True):
        assert completion.token_ids == answer.tokens, f"prompt of {len(answer.prompt)} tokens"
        assert completion.finish_reason == "length"
        assert completion.usage.prompt_tokens == len(answer.prompt)
        assert completion.usage.output_tokens == OUTPUT
        assert bool(completion.prompt_logprobs) == ("prompt_logprobs" in options)
    return completions


async def test_split_over_shared_memory(routes):
    prefill, decode = routes.wide
    first = await answer_all(routes, routes.wide_split, namespace="split")
    for answer, completion in zip(routes.answers, first, strict=True):
        assert completion.usage.cached_tokens == 0
        handed_off = len(answer.prompt) > LOCAL_PREFILL_TOKENS
        assert completion.stats.prefill_address == (prefill.address if handed_off else "")
        assert completion.stats.transport == ("shm" if handed_off else "")
        pages = handed_over(len(answer.prompt), routes.groups) if handed_off else 0
        assert completion.stats.pulled_pages == pages
        assert completion.stats.decode_address == decode.address
    again = await answer_all(routes, routes.wide_split, namespace="split")
    for answer, completion in zip(routes.answers, again, strict=True):
        # All full pages but the one that the last token is computed in.
        assert completion.usage.cached_tokens == (len(answer.prompt) - 1) // 16 * 16


async def test_aggregated(routes):
    first = await answer_all(routes, routes.wide_aggregated, namespace="aggregated")
    assert all(completion.usage.cached_tokens == 0 for completion in first)
    assert all(completion.stats.prefill_address == "" for completion in first)
    again = await answer_all(routes, routes.wide_aggregated, namespace="aggregated")
    assert [c.usage.cached_tokens for c in again] == [(len(a.prompt) - 1) // 16 * 16 for a in routes.answers]


async def until_retracted(routes: Routes, gateway: Process, before: int) -> None:
    """Which of the prompts are in the pool together is by chance: once in many rounds all have room."""
    decode = routes.narrow[1]
    for attempt in range(ROUNDS):
        if decode.load().retractions > before:
            return
        await answer_all(routes, gateway, namespace=f"{gateway.name} {attempt}")
    assert decode.load().retractions > before, f"none in {ROUNDS} more rounds"


of_each_kind = pytest.mark.parametrize(
    "routes", params([name for name in MODELS if name not in WIDE_ONLY]), indirect=True, scope="module"
)


@of_each_kind
async def test_split_over_grpc_in_chunks_of_one_page_under_retraction(routes):
    prefill, decode = routes.narrow
    before = decode.load()
    first = await answer_all(routes, routes.narrow_split, namespace="split")
    for answer, completion in zip(routes.answers, first, strict=True):
        if len(answer.prompt) > 1 and not completion.stats.retractions:
            assert completion.stats.prefill_address == prefill.address
            assert completion.stats.transport == "grpc"
    again = await answer_all(routes, routes.narrow_split, namespace="split")
    assert max(completion.usage.cached_tokens for completion in again) == 288
    await until_retracted(routes, routes.narrow_split, before.retractions)
    assert decode.load().pulled_pages > before.pulled_pages


@of_each_kind
async def test_aggregated_in_chunks_of_one_page_under_retraction(routes):
    decode = routes.narrow[1]
    before = decode.load()
    completions = await answer_all(routes, routes.narrow_aggregated, namespace="aggregated")
    assert all(completion.stats.prefill_address == "" for completion in completions)
    await until_retracted(routes, routes.narrow_aggregated, before.retractions)
    after = decode.load()
    assert after.pulled_pages == before.pulled_pages


of_one_model = pytest.mark.parametrize("routes", params(["qwen3"]), indirect=True, scope="module")
"""For what does not depend on the architecture."""

SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 2.0, 9: -100.0},
    },
]


@of_one_model
async def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(routes):
    prompts = [answer.prompt for answer in routes.answers if len(answer.prompt) in (2, 33, 160, 300)]
    requests = [
        {"token_ids": prompt, "max_tokens": 32, "seed": 11 + i, "ignore_eos": True, **sampling}
        for i, (prompt, sampling) in enumerate(zip(prompts, SAMPLED, strict=True))
    ]
    alone = [(await ask(routes.wide_split.address, [request]))[0].token_ids for request in requests]
    assert all(len(set(tokens)) > 4 for tokens in alone), "these outputs say nothing"
    others = [greedy(answer.prompt, 24) for answer in [*routes.answers, *routes.answers[-4:]]]
    for gateway in (routes.wide_split, routes.wide_aggregated, routes.narrow_split, routes.narrow_aggregated):
        completions = await ask(gateway.address, [*others, *requests])
        assert [completion.token_ids for completion in completions[len(others) :]] == alone
    different = [{**request, "seed": request["seed"] + 100} for request in requests]
    completions = await ask(routes.wide_split.address, different)
    assert all(c.token_ids != tokens for c, tokens in zip(completions, alone, strict=True))


@pytest.mark.parametrize(
    "routes", params(["qwen3", *(["qwen3.5"] if WHOLE else [])]), indirect=True, scope="module"
)
async def test_choices_equal_requests_of_their_own(routes):
    for gateway in (routes.wide_split, routes.wide_aggregated, routes.narrow_split):
        for answer in (routes.answers[2], routes.answers[9]):
            request = {"token_ids": answer.prompt, "max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
            whole, *parts = await ask(
                gateway.address,
                [{**request, "seed": 5, "n": 4}, *({**request, "seed": 5 + i} for i in range(4))],
            )
            assert [choice.token_ids for choice in whole.choices] == [part.token_ids for part in parts]
            assert len({tuple(part.token_ids) for part in parts}) == 4
            assert whole.usage.output_tokens == 4 * 24


@of_one_model
async def test_an_output_of_one_token_is_never_pulled(routes):
    """By max_tokens. A stop token cannot be foreseen: where pages are announced ahead their pull waits for
    their step by then. It ends, and the answer is the same."""
    decode = routes.wide[1]
    long = [answer for answer in routes.answers if len(answer.prompt) > 64]
    before = decode.load()
    ending = ({"max_tokens": 1}, {"stop_token_ids": [answer.tokens[0] for answer in long]})
    for number, end in enumerate(ending):
        requests = [{**greedy(answer.prompt, OUTPUT, namespace=f"one {number}"), **end} for answer in long]
        completions = [(await ask(routes.wide_split.address, [request]))[0] for request in requests]
        assert [completion.token_ids for completion in completions] == [answer.tokens[:1] for answer in long]
        assert {completion.finish_reason for completion in completions} == {("length", "stop")[number]}
        assert {completion.stats.prefill_address for completion in completions} == {routes.wide[0].address}
        if "max_tokens" in end:
            assert decode.load().pulled_pages == before.pulled_pages


async def test_log_probabilities(routes, request):
    """By all routes for one model; for others by one, with chunks and retractions where there are any."""
    ways = (routes.wide_split, routes.wide_aggregated, routes.narrow_split)
    if not WHOLE and request.node.callspec.params["routes"] != "qwen3":
        ways = (routes.narrow_split or routes.wide_split,)
    for gateway in filter(None, ways):
        completions = await answer_all(routes, gateway, logprobs=3, prompt_logprobs=2)
        for answer, completion in zip(routes.answers, completions, strict=True):
            assert completion.usage.cached_tokens == 0  # the whole prompt is computed
            assert completion.prompt_logprobs[0].chosen is None
            check_logprobs(completion.prompt_logprobs[1:], answer.prompt[1:], answer.prompt_logprobs, 2)
            check_logprobs(completion.choices[0].logprobs, answer.tokens, answer.logprobs, 3)


def check_logprobs(positions, tokens, expected, top):
    """expected: float32 [position, vocabulary]."""
    assert len(positions) == len(tokens) == len(expected)
    for position, token, row in zip(positions, tokens, expected, strict=True):
        assert position.chosen.token_id == token
        best = [entry.logprob for entry in position.top]
        assert len(best) == top and best == sorted(best, reverse=True)
        for entry in (position.chosen, *position.top):
            assert abs(entry.logprob - float(row[entry.token_id])) < 1e-4
        assert abs(best[-1] - float(row.topk(top).values[-1])) < 1e-4
