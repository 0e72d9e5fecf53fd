"""Prefill and decode as processes of their own on GPUs; on one GPU, or on two where there are two."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from checkpoints import VOCABULARY, make_model, save
from deployment import Deployment

LENGTHS = [2, 63, 64, 65, 128, 300, 700]
OUTPUT = 24
WORKER = ("--device", "cuda", "--dtype", "bfloat16", "--kv-tokens", "16384", "--token-budget", "256")
WORKER += ("--max-rows", "8", "--page-size", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = make_model(
        "qwen3",
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        num_attention_heads=8,
        num_hidden_layers=4,
    )
    return save(model, tmp_path_factory.mktemp("qwen3"))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def answers(deployment: Deployment, what: list[list[int]]):
    client = deployment.client()
    return [
        client.generate(token_ids=prompt, temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        for prompt in what
    ]


def on_gpus(deployment: Deployment) -> Deployment:
    """A GPU for each worker; they take turns."""
    count = torch.cuda.device_count()
    workers = deployment.of("prefill") + deployment.of("decode")
    for number, worker in enumerate(workers):
        worker.environment["CUDA_VISIBLE_DEVICES"] = str(number % count)
        worker.forked = False  # CUDA may have been looked for before the fork
    return deployment


@pytest.fixture(scope="module")
def aggregated(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("aggregated")
    with on_gpus(Deployment.split(folder, model, prefill=0, worker=WORKER)) as deployment:
        completions = answers(deployment, prompts())
        deployment.assert_idle()
    assert all(completion.stats.pulled_pages == 0 for completion in completions)
    return [completion.choices[0].token_ids for completion in completions]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_gpu_by_its_index(model, aggregated, tmp_path):
    worker = (*WORKER, "--device", "cuda:1")
    deployment = Deployment.split(
        tmp_path, model, worker=worker, decode_flags=("--local-prefill-tokens", "0")
    )
    for process in deployment.of("prefill") + deployment.of("decode"):
        process.forked = False
    with deployment:
        completions = answers(deployment, prompts())
        assert [completion.choices[0].token_ids for completion in completions] == aggregated
        assert all(completion.stats.pulled_pages for completion in completions)


@pytest.mark.parametrize("transport", ["cuda_ipc", "grpc"])
def test_split_equals_aggregated(model, aggregated, tmp_path, transport):
    flags = ("--local-prefill-tokens", "0")
    worker = (*WORKER, "--transports", transport)
    with on_gpus(Deployment.split(tmp_path, model, worker=worker, decode_flags=flags)) as deployment:
        completions = answers(deployment, prompts())
        assert [completion.choices[0].token_ids for completion in completions] == aggregated
        for length, completion in zip(LENGTHS, completions, strict=True):
            assert completion.stats.transport == transport
            assert completion.stats.pulled_pages == -(-length // 64)
            assert completion.stats.handoff_retries == 0
        # Once more: of longer prompts the prefix trees hold pages, so that their chunks are others.
        again = answers(deployment, prompts()[:3])
        assert [completion.choices[0].token_ids for completion in again] == aggregated[:3]
        deployment.assert_idle()
        assert "Traceback" not in deployment.prefill.log.read_text() + deployment.decode.log.read_text()


def test_decode_survives_its_prefill_node(model, tmp_path):
    """Killed while its pool is mapped and pulled from; then started again."""
    flags = ("--local-prefill-tokens", "0")
    with on_gpus(Deployment.split(tmp_path, model, worker=WORKER, decode_flags=flags)) as deployment:
        first = answers(deployment, prompts()[4:])
        assert {completion.stats.transport for completion in first} == {"cuda_ipc"}
        decode = deployment.decode.pid
        generator = torch.Generator().manual_seed(9)
        many = [torch.randint(3, VOCABULARY, (500,), generator=generator).tolist() for _ in range(60)]
        done: list = []
        asking = threading.Thread(target=lambda: done.extend(answers(deployment, many)))
        asking.start()
        while deployment.decode.load().requests == 0:
            time.sleep(0.001)
        deployment.prefill.kill()
        asking.join(120)
        assert len(done) == len(many)
        deployment.assert_idle()
        deployment.prefill.start()
        deployment.prefill.wait_ready()
        for _ in range(100):
            fresh = torch.randint(3, VOCABULARY, (200,), generator=generator).tolist()
            (completion,) = answers(deployment, [fresh])
            if completion.stats.transport == "cuda_ipc":
                break
        assert completion.stats.transport == "cuda_ipc" and completion.stats.pulled_pages == 4
        assert deployment.decode.alive and deployment.decode.pid == decode
        deployment.assert_idle()
