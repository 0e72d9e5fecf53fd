"""Embeddings against the hidden states of transformers, through all that serves them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import openai
import pytest
import torch
from checkpoints import make_model, save
from deployment import Deployment
from polling import until
from process import Process

from baton.client import AsyncClient, BatonError
from baton.rpc.errors import from_rpc_error
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    embed_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

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

    @torch.inference_mode()
    def logprobs(self, prompt: list[int]) -> np.ndarray:
        """Of each token but the first."""
        ids = torch.tensor([prompt])
        return self._model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


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


# Through the gateway.


def test_the_client(served):
    deployment, expected = served
    client = deployment.client()
    given = prompts(3, 40, 700, seed=11)
    for pooling in ("last", "mean"):
        answer = client.embed(given, pooling=pooling)
        for prompt, vector in zip(given, answer.vectors, strict=True):
            assert np.abs(np.array(vector) - expected.of(prompt, pooling == "mean")).max() < TOLERANCE
        assert answer.prompt_tokens == 743
    many = prompts(*[5] * 300, seed=12)  # more than a call of a node takes
    for prompt, vector in zip(many, client.embed(many, dimensions=8).vectors, strict=True):
        assert np.abs(np.array(vector) - expected.of(prompt, False, size=8)).max() < TOLERANCE


def test_the_openai_client(served):
    deployment, expected = served
    texts = ["a list of words", "another one", "ü"]
    mine = deployment.client().embed(texts)
    with openai.OpenAI(base_url=f"http://{deployment.gateway.http}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        # By default it asks for base64.
        for form in ({}, {"encoding_format": "float"}):
            answer = client.embeddings.create(model=model, input=texts, **form)
            assert [each.index for each in answer.data] == [0, 1, 2]
            for each, vector in zip(answer.data, mine.vectors, strict=True):
                assert np.abs(np.array(each.embedding) - np.array(vector)).max() < 1e-6
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == mine.prompt_tokens
        (prompt,) = prompts(20, seed=13)
        for given in (prompt, [prompt]):
            short = client.embeddings.create(model=model, input=given, dimensions=5, user="me")
            wanted = expected.of(prompt, False, size=5)
            assert np.abs(np.array(short.data[0].embedding) - wanted).max() < TOLERANCE
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]"):
            client.embeddings.create(model=model, input=["a", ""])
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=model, input="a", dimensions=65)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")


def test_scores(served):
    deployment, expected = served
    with httpx.Client(base_url=f"http://{deployment.gateway.http}", trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        documents = ["one document", "and one more", "the third of them"]
        body = {"model": model, "text_1": documents, "text_2": "a query"}
        body["text_2"] = ["a query"] * 3
        scored = http.post("/v1/score", json=body).json()
        for document, each in zip(documents, scored["data"], strict=True):
            first, second = (deployment_tokens(deployment, text) for text in (document, "a query"))
            wanted = expected.logprobs([*first, *second])[-len(second) :].mean()
            assert abs(each["score"] - wanted) < TOLERANCE
        ranked = http.post(
            "/v1/rerank", json={"model": model, "query": "a query", "documents": documents, "top_n": 2}
        ).json()["results"]
        relevance = {}
        for index, document in enumerate(documents):
            first, second = (deployment_tokens(deployment, text) for text in (f"{document}\n", "a query"))
            relevance[index] = math.exp(expected.logprobs([*first, *second])[-len(second) :].mean())
        best = sorted(relevance, key=lambda index: -relevance[index])[:2]
        assert [each["index"] for each in ranked] == best
        assert [each["document"]["text"] for each in ranked] == [documents[index] for index in best]
        for each in ranked:
            assert abs(each["relevance_score"] - relevance[each["index"]]) < TOLERANCE
        for path, body, param in (
            ("score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
            ("score", {"text_1": "a", "text_2": ["c", ""]}, "text_2[1]"),
            ("score", {"text_1": "a", "text_2": []}, "text_2"),
            ("rerank", {"query": "", "documents": ["a"]}, "query"),
            ("rerank", {"query": "a", "documents": ["a" * 5000]}, "documents[0]"),
            ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
            ("rerank", {"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
        ):
            wrong = http.post(f"/v1/{path}", json={"model": model, **body})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param), wrong.text


def deployment_tokens(deployment: Deployment, text: str) -> list[int]:
    stub = tokenizer_pb2_grpc.TokenizerStub(grpc.insecure_channel(deployment.of("tokenizer")[0].address))
    return list(stub.Encode(tokenizer_pb2.EncodeRequest(inputs=[{"text": text}])).results[0].token_ids)


async def test_clients_that_leave_free_everything(served):
    deployment, _ = served
    many = prompts(*[1024] * 64, seed=14)
    async with AsyncClient(deployment.gateway.address) as client:
        with pytest.raises(BatonError) as late:
            await client.embed(many, pooling="mean", timeout=0.3)
        assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        deployment.assert_idle()
        running = asyncio.ensure_future(client.embed(many, pooling="mean"))
        await until(lambda: node(deployment).load().prefilling, "the prompts are being computed")
        running.cancel()
        await asyncio.wait({running})
        deployment.assert_idle()
    async with httpx.AsyncClient(trust_env=False) as http:
        body = {"model": "model", "input": many, "pooling": "mean"}
        url = f"http://{deployment.gateway.http}/v1/embeddings"
        running = asyncio.ensure_future(http.post(url, json=body, timeout=60))
        await until(lambda: node(deployment).load().prefilling, "the prompts are being computed")
        running.cancel()
        await asyncio.wait({running})
        deployment.assert_idle()


def test_a_lost_prefill_node(tmp_path, deployments):
    """Another one computes the prompts, then the decode node."""
    model = make_model("qwen3", seed=3)
    with Deployment.split(tmp_path, save(model, tmp_path / "model"), prefill=2) as deployment:
        deployments.append(deployment)
        expected, client = Expected(model), deployment.client()
        given = prompts(*[100] * 100, seed=15)
        for lost in deployment.of("prefill"):
            with concurrent.futures.ThreadPoolExecutor(1) as threads:
                answer = threads.submit(client.embed, given, pooling="mean")
                lost.kill()
                vectors = answer.result().vectors
            for prompt, vector in zip(given, vectors, strict=True):
                assert np.abs(np.array(vector) - expected.of(prompt, True)).max() < TOLERANCE
            assert len(client.embed(given[:3]).vectors) == 3


def test_a_checkpoint_for_embeddings_alone(tmp_path, deployments):
    """As sentence-transformers keeps them: without a head, names that start with no `model.`, a mean that is
    not normalized unless it is asked for."""
    model = make_model("qwen3", seed=4, tie_word_embeddings=False)
    folder = save(model, tmp_path / "model")
    model.model.save_pretrained(folder)
    pooling_of(folder, "mean_tokens", normalize=False)
    with Deployment.split(tmp_path, folder) as deployment:
        deployments.append(deployment)
        expected, client = Expected(model), deployment.client()
        given = prompts(3, 200, seed=16)
        for options, mean, normalize in (
            ({}, True, False),
            ({"normalize": True}, True, True),
            ({"pooling": "last"}, False, False),
        ):
            for prompt, vector in zip(given, client.embed(given, **options).vectors, strict=True):
                wanted = expected.of(prompt, mean, normalize)
                assert np.abs(np.array(vector) - wanted).max() < TOLERANCE * max(1, np.abs(wanted).max())
        url, body = f"http://{deployment.gateway.http}/v1/", {"model": client.models()[0].name}
        by_http = httpx.post(f"{url}embeddings", json={**body, "input": given}, trust_env=False).json()
        for prompt, each in zip(given, by_http["data"], strict=True):
            wanted = expected.of(prompt, True, False)
            assert np.abs(np.array(each["embedding"]) - wanted).max() < TOLERANCE * np.abs(wanted).max()
        refused = httpx.post(f"{url}completions", json={**body, "prompt": given[0]}, trust_env=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "embeds_only"), refused.text
        with pytest.raises(BatonError, match="embeddings alone") as failed:
            client.generate(token_ids=given[0], max_tokens=2)
        assert failed.value.code is grpc.StatusCode.FAILED_PRECONDITION
        stub = decode_pb2_grpc.DecodeStub(grpc.insecure_channel(deployment.of("decode")[0].address))
        commands = [{"hello": {"incarnation": 7}}, {"start": {"token_ids": given[0]}}]
        events = stub.Generate((decode_pb2.GenerateCommand(**each) for each in commands), timeout=20)
        assert "embeddings alone" in str(list(events))


def pooling_of(folder: Path, mode: str, normalize: bool) -> None:
    """Writes the files that sentence-transformers reads."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if normalize else {})}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
