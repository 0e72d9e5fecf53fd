"""Embeddings against the hidden states of transformers, through all that serves them."""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import torch
from checkpoints import make_model, save
from deployment import Deployment
from polling import until
from process import Process

from baton.rpc.errors import from_rpc_error
from baton.v1 import decode_pb2_grpc, embed_pb2, prefill_pb2_grpc

MEAN, LAST = embed_pb2.POOLING_MEAN, embed_pb2.POOLING_LAST
LENGTHS = (1, 2, 15, 16, 17, 40, 200, 700, 1023, 1024)
"""Of prompts; a step computes 512 tokens."""
TOLERANCE = 1e-4


class Expected:
    """Embeddings by transformers, one prompt at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.size = model.config.hidden_size

    @torch.inference_mode()
    def of(
        self, prompt: list[int], mean: bool, normalize: bool = True, size: int | None = None
    ) -> np.ndarray:
        states = self._model.model(torch.tensor([prompt])).last_hidden_state[0]
        vector = (states.mean(0) if mean else states[-1])[:size]
        return (vector / vector.norm() if normalize else vector).numpy()


@pytest.fixture(scope="module", params=["qwen3", "llama aggregated"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, deployments: list[Deployment]
) -> Iterator[tuple[Deployment, Expected]]:
    name, _, aggregated = request.param.partition(" ")
    model = make_model(name, seed=3)
    folder = tmp_path_factory.mktemp(name)
    with Deployment.split(
        folder, save(model, folder / "model"), prefill=0 if aggregated else 1
    ) as deployment:
        deployments.append(deployment)
        yield deployment, Expected(model)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]


def node(deployment: Deployment) -> Process:
    """A prefill node, or the decode node where there is none."""
    return (deployment.of("prefill") or deployment.of("decode"))[0]


def node_stub(deployment: Deployment):
    process = node(deployment)
    stubs = {"prefill": prefill_pb2_grpc.PrefillStub, "decode": decode_pb2_grpc.DecodeStub}
    return stubs[process.role](grpc.insecure_channel(process.address))


def message(given: list[list[int]], **fields) -> embed_pb2.EmbedPrompts:
    return embed_pb2.EmbedPrompts(prompts=[{"token_ids": each} for each in given], **fields)


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_a_worker_computes_what_transformers_does(served, pooling):
    deployment, expected = served
    given = prompts(*LENGTHS, seed=pooling)
    # All at once: they share steps.
    answer = node_stub(deployment).Embed(message(given, pooling=pooling), timeout=60)
    for prompt, embedding in zip(given, answer.embeddings, strict=True):
        wanted = expected.of(prompt, pooling == MEAN)
        assert np.abs(np.array(embedding.values) - wanted).max() < TOLERANCE, len(prompt)
        assert embedding.prompt_tokens == len(prompt)


def test_cached_pages_change_nothing(served):
    deployment, expected = served
    (prompt,) = prompts(300, seed=9)
    stub = node_stub(deployment)
    stub.Embed(message([prompt[:-20]]), timeout=60)
    for pooling, cached in ((LAST, 272), (MEAN, 0)):
        (embedding,) = stub.Embed(message([prompt], pooling=pooling), timeout=60).embeddings
        assert embedding.cached_tokens == cached
        wanted = expected.of(prompt, pooling == MEAN)
        assert np.abs(np.array(embedding.values) - wanted).max() < TOLERANCE


def test_dimensions_and_length(served):
    deployment, expected = served
    (prompt,) = prompts(30)
    for size, normalize in ((None, False), (10, False), (10, True)):
        sent = message([prompt], normalize=normalize, dimensions=size)
        (embedding,) = node_stub(deployment).Embed(sent, timeout=60).embeddings
        wanted = expected.of(prompt, False, normalize, size)
        assert len(embedding.values) == (size or expected.size)
        assert np.abs(np.array(embedding.values) - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_beside_generation(served):
    """Tokens and embeddings stay what they are alone."""
    deployment, expected = served
    client = deployment.client()
    given = prompts(*[64] * 8, seed=4)
    alone = [client.generate(token_ids=each, max_tokens=20, temperature=0).token_ids for each in given]
    others = prompts(*[300] * 16, seed=5)
    with concurrent.futures.ThreadPoolExecutor(9) as threads:
        embedding = threads.submit(node_stub(deployment).Embed, message(others, pooling=MEAN), timeout=60)
        running = [
            threads.submit(client.generate, token_ids=each, max_tokens=20, temperature=0) for each in given
        ]
        assert [each.result().token_ids for each in running] == alone
        for prompt, got in zip(others, embedding.result().embeddings, strict=True):
            assert np.abs(np.array(got.values) - expected.of(prompt, True)).max() < TOLERANCE


async def test_cancel_and_deadline_free_everything(served):
    deployment, _ = served
    stub = node_stub(deployment)
    many = prompts(*[1024] * 64, seed=6)
    late = message(many, pooling=MEAN)
    with pytest.raises(grpc.RpcError) as failed:
        stub.Embed(late, timeout=0.3)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    deployment.assert_idle()
    call = stub.Embed.future(late, timeout=60)
    await until(lambda: node(deployment).load().prefilling, "the prompts are being computed")
    call.cancel()
    deployment.assert_idle()


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"given": []}, "prompts"),
        ({"given": [[5]] * 257}, "prompts"),
        ({"given": [[5], []]}, "prompts[1].token_ids"),
        ({"given": [[5] * 1025]}, "prompts[0].token_ids"),
        ({"given": [[5], [320]]}, "prompts[1].token_ids[0]"),
        ({"given": [[5]], "dimensions": 0}, "dimensions"),
        ({"given": [[5]], "dimensions": 65}, "dimensions"),
        ({"given": [[5]], "pooling": 7}, "pooling"),
    ],
)
def test_what_is_wrong_is_named(served, fields, field):
    deployment, _ = served
    with pytest.raises(grpc.RpcError) as failed:
        node_stub(deployment).Embed(message(**fields), timeout=20)
    error = from_rpc_error(failed.value)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field), error
