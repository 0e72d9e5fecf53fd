"""Greedy output through all four processes equals transformers' generate(), whatever the route."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from asking import ask, greedy
from checkpoints import ARCHITECTURES, make_model, save
from deployment import Deployment
from process import Process
from reference import Answer, Reference

OUTPUT = 64
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 160, 300]
"""Around page borders, and more rows than the narrow workers have."""
NARROW = ("--token-budget", "16", "--max-rows", "8", "--page-size", "16", "--transports", "grpc")
"""Chunks of one page at most, pages over gRPC."""
TIGHT = ("--kv-tokens", "400", "--output-margin", "1", "--watermark", "0")
"""Pages for one of the long prompts at a time, none set aside for output: sequences are retracted."""


@dataclass
class Routes:
    """One model behind four gateways."""

    deployment: Deployment
    answers: list[Answer]
    wide_split: Process
    wide_aggregated: Process
    narrow_split: Process
    narrow_aggregated: Process
    wide: tuple[Process, Process]
    narrow: tuple[Process, Process]
    """Prefill and decode."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def routes(request, tmp_path_factory, deployments) -> Iterator[Routes]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    deployment = Deployment(folder, save(model, folder / "model"))
    wide = (
        deployment.add_worker("prefill", "--kv-tokens", "8192"),
        deployment.add_worker("decode", "--kv-tokens", "8192"),
    )
    narrow = (
        deployment.add_worker("prefill", *NARROW, "--kv-tokens", "4096"),
        deployment.add_worker("decode", *NARROW, *TIGHT, "--local-prefill-tokens", "1"),
    )
    routes = Routes(
        deployment,
        Reference(model).answers(LENGTHS, OUTPUT),
        deployment.add_gateway([wide[1]], [wide[0]]),
        deployment.add_gateway([wide[1]]),
        deployment.add_gateway([narrow[1]], [narrow[0]]),
        deployment.add_gateway([narrow[1]]),
        wide,
        narrow,
    )
    with deployment:
        deployments.append(deployment)
        yield routes


async def answer_all(routes: Routes, gateway: Process, **options):
    """All prompts at once; fails unless each answer is the reference's."""
    requests = [greedy(answer.prompt, OUTPUT, **options) for answer in routes.answers]
    completions = await ask(gateway.address, requests)
    for answer, completion in zip(routes.answers, completions, strict=True):
        assert completion.token_ids == answer.tokens, f"prompt of {len(answer.prompt)} tokens"
        assert completion.finish_reason == "length"
        assert completion.usage.prompt_tokens == len(answer.prompt)
        assert completion.usage.output_tokens == OUTPUT
    return completions


async def test_split_over_shared_memory(routes):
    prefill, decode = routes.wide
    first = await answer_all(routes, routes.wide_split, namespace="split")
    for answer, completion in zip(routes.answers, first, strict=True):
        assert completion.usage.cached_tokens == 0
        handed_off = len(answer.prompt) > 64
        assert completion.stats.prefill_address == (prefill.address if handed_off else "")
        assert completion.stats.transport == ("shm" if handed_off else "")
        assert completion.stats.pulled_pages == (-(-len(answer.prompt) // 16) if handed_off else 0)
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
    assert decode.load().retractions > before.retractions
    assert decode.load().pulled_pages > before.pulled_pages


async def test_aggregated_in_chunks_of_one_page_under_retraction(routes):
    decode = routes.narrow[1]
    before = decode.load()
    for _ in range(2):
        completions = await answer_all(routes, routes.narrow_aggregated, namespace="aggregated")
        assert all(completion.stats.prefill_address == "" for completion in completions)
    after = decode.load()
    assert after.retractions > before.retractions
    assert after.pulled_pages == before.pulled_pages
