"""A worker's engine on a GPU: pool sized from what is left, the fast runner, errors that say what to do."""

from __future__ import annotations

import json

import pytest
import torch
from test_runner import assert_greedy, greedy

from rig import _CONFIG, GREEDY, generate, prompts_of, save_checkpoint

pytest.importorskip("structlog")


from baton.config import WorkerConfig
from baton.engine.sampling_params import SamplingParams
from baton.engine.warmup import Unconstrained
from baton.rpc.errors import BatonError
from baton.worker.engine import build_engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model"))


def config(path, **options):
    return WorkerConfig(model=str(path), **{"device": "cuda", "dtype": "bfloat16", "max_rows": 16} | options)


def test_engine(checkpoint):
    engine = build_engine(config(checkpoint, memory_fraction=0.5), 1)
    free, total = torch.cuda.mem_get_info()
    assert engine.runner.kernels and engine.overlap
    assert abs((total - free) / total - 0.5) < 0.05
    assert engine.cache.counts().total == engine.pool.num_pages
    assert [endpoint.WhichOneof("kind") for endpoint in engine.endpoints()] == ["cuda_ipc", "grpc"]
    prompts = prompts_of(5, 100, 33)
    assert_greedy(checkpoint, prompts, generate(engine.runner, engine.cache, prompts, greedy(3)), 0.3)


PENALIZED = SamplingParams(
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    logit_bias={3: 1.0},
    logprobs=20,
    prompt_logprobs=20,
    max_tokens=40,
)


def test_the_worst_batch_fits_into_what_was_promised_at_the_start(tmp_path):
    """A large vocabulary, and more sequences at a time than the model's size lets one expect: sampling takes
    gigabytes. torch refuses what exceeds the promised fraction."""
    (tmp_path / "config.json").write_text(json.dumps({**_CONFIG, "vocab_size": 150_000}))
    fraction, total = 0.2, torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        options = {"load_format": "dummy", "memory_fraction": fraction, "max_rows": 256}
        engine = build_engine(config(tmp_path, **options), 1)
        before = torch.cuda.memory_reserved()
        assert before > 0.97 * fraction * total, "the pool takes what is left"
        torch.cuda.reset_peak_memory_stats()
        prompts = prompts_of(*[100] * 255, 900)
        grammars = [Unconstrained()] * 256
        params = [PENALIZED] * 256
        found = generate(engine.runner, engine.cache, prompts, params, budget=2048, grammars=grammars)
        assert [len(tokens) for tokens in found] == [40] * 256
        assert torch.cuda.max_memory_reserved() - before < 2**27, "next to nothing after the start"
        del engine
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_float32_is_run_in_graphs_too(checkpoint):
    engine = build_engine(config(checkpoint, dtype="float32", kv_tokens=4096), 1)
    assert engine.runner.kernels and engine.runner.graphs is not None
    assert len(generate(engine.runner, engine.cache, prompts_of(9), [GREEDY])[0]) == 1


def test_random_weights_need_no_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    engine = build_engine(config(tmp_path, load_format="dummy", kv_tokens=4096), 1)
    assert len(generate(engine.runner, engine.cache, prompts_of(9), [GREEDY])[0]) == 1


def test_a_model_that_does_not_fit(checkpoint):
    with pytest.raises(
        BatonError, match=r"does not fit: its weights take .* GiB, of which this process may use 0%"
    ):
        build_engine(config(checkpoint, memory_fraction=0.001), 1)
