"""What a head keeps of a prompt crosses the split from GPU to GPU: the first step after a hand-off drafts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from test_deployment import WORKER, answers, on_gpus, prompts
from test_draft_heads_on_gpu import save_eagle3

sys.path += [str(Path(__file__).parents[1] / each) for each in ("cluster", "contract")]

from checkpoints import VOCABULARY, make_model, save
from deployment import Deployment

from baton.config import DecodeConfig, PrefillConfig
from baton.rpc.address import new_incarnation
from baton.worker.decode import draft_pulls
from baton.worker.decode.server import DecodeNode
from baton.worker.engine import build_engine
from baton.worker.prefill.server import PrefillNode

MOST = 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
    model = save(make_model("qwen3", num_attention_heads=8, **sizes), tmp_path_factory.mktemp("qwen3"))
    return model, save_eagle3(tmp_path_factory.mktemp("heads") / "head", VOCABULARY)


@pytest.mark.parametrize("transport", ["cuda_ipc", "grpc"])
def test_the_first_step_drafts(paths, tmp_path, transport):
    """Of three tokens the first is the prefill node's, and only the step after it may carry a draft."""
    model, head = paths
    worker = (*WORKER, "--dtype", "float32", "--transports", transport)
    decode = ("--local-prefill-tokens", "0", "--draft-tokens", str(MOST))
    for each in ("on", "off"):
        (tmp_path / each).mkdir()
    made = Deployment.split(tmp_path / "off", model, worker=worker, decode_flags=decode[:2])
    with on_gpus(made) as deployment:
        expected = [each.choices[0].token_ids for each in answers(deployment, prompts())]
    made = Deployment.split(
        tmp_path / "on", model, worker=(*worker, "--draft", str(head)), decode_flags=decode
    )
    with on_gpus(made) as deployment:
        found = answers(deployment, prompts())
        assert [each.choices[0].token_ids for each in found] == expected
        assert all(each.stats.transport == transport for each in found)
        client = deployment.client()
        for number, prompt in enumerate(prompts()):
            short = client.generate(
                token_ids=[*prompt, number + 5], max_tokens=3, temperature=0, ignore_eos=True
            )
            assert short.usage.drafted_tokens == 1 and short.stats.pulled_pages
        logs = deployment.decode.log.read_text() + deployment.prefill.log.read_text()
        assert "pages of drafts do not come" not in logs and "Traceback" not in logs
        opened = [line for line in logs.splitlines() if "pool of a peer opened" in line and "pool=1" in line]
        assert opened and all(transport in line for line in opened), logs
        deployment.assert_idle()


async def test_drafts_are_those_of_one_node(paths, monkeypatch):
    """The head attends to the prompt's pages: its drafts are those behind prompts computed there."""
    from test_draft_pages import answers as ask_all
    from test_draft_pages import leased, running

    model, head = map(str, paths)
    monkeypatch.setattr(draft_pulls, "WAIT_SECONDS", 20.0)
    made = {"http_port": 0, "kv_tokens": 16384, "model": model, "max_rows": 4, "draft": head}
    made |= {"device": "cuda", "dtype": "float32", "page_size": 64, "transports": ("grpc",)}
    prefill = PrefillNode(PrefillConfig(**made, token_budget=128))
    decode = DecodeNode(DecodeConfig(**made, draft_tokens=MOST))
    asked = [prompt for prompt in prompts() if len(prompt) > 60]
    async with running(prefill), running(decode):
        alone = await ask_all(decode, None, asked, namespace="alone")
        split = await ask_all(decode, prefill, asked)
        assert [tokens for tokens, _ in split] == [tokens for tokens, _ in alone]
        # Chunks of other lengths are rounded otherwise, so that a guess of near ties may be another.
        pairs = [
            (a, b)
            for (_, one), (_, other) in zip(split, alone, strict=True)
            for a, b in zip(one[0][0], other[0][0], strict=True)
        ]
        assert len(pairs) == MOST * len(asked) and sum(a == b for a, b in pairs) > 0.8 * len(pairs)
        # Whole and partial pages of all but the last token of each, with the pair before that.
        rows = sum(-(-(len(prompt) - 1) // 64) for prompt in asked)
        assert decode.core_or_none.handoffs.drafts.pulled_pages == rows
        await asyncio.to_thread(prefill.check_idle)
        await asyncio.to_thread(decode.check_idle)
        assert not leased(prefill)


def test_what_a_prefill_node_drafts_with_is_a_part_of_its_working_memory(paths):
    """Once the engine is built, the head's pass over a whole step's tokens takes nothing more."""
    model, head = map(str, paths)
    sizes = {"kv_tokens": 16384, "max_rows": 4, "token_budget": 256, "transports": ("grpc",)}
    config = PrefillConfig(model=model, draft=head, device="cuda", dtype="float32", **sizes)
    engine = build_engine(config, new_incarnation())
    try:
        drafter = engine.drafter.drafter
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            drafter.fill_most(255)
        assert torch.cuda.memory_reserved() == before
    finally:
        engine.close()
