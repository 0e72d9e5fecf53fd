"""The first decode step after a hand-off carries drafts, whichever drafter there is: real nodes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import torch
from safetensors.torch import save_file

from baton.config import DecodeConfig, PrefillConfig
from baton.engine.draft.oracle import prompt_digest
from baton.rpc.channel import open_channel
from baton.rpc.node import run_node
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from baton.worker.decode.drafters import ORACLE
from baton.worker.decode.server import DecodeNode
from baton.worker.prefill.server import PrefillNode
from baton.worker.process import WorkerProcess

HIDDEN, VOCAB, INNER = 256, 4096, 512
"""Of the demo model, and of heads for it."""
MADE = {"http_port": 0, "kv_tokens": 2048, "threads": 1, "model": "demo", "max_rows": 4}
MOST = 4
PROMPT = [*range(40, 70)] * 2


@asynccontextmanager
async def running(node):
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_node(WorkerProcess(node), node.config, ready=ready, stop=stop))
    await asyncio.wait_for(ready.wait(), 60)
    try:
        yield node
    finally:
        stop.set()
        assert await asyncio.wait_for(task, 20) == 0


async def answer_of(call, n):
    """Tokens of each choice, and the request's statistics, once it has ended."""
    found, stats = [[] for _ in range(n)], None
    while stats is None:
        message = await call.read()
        for delta in message.tokens:
            found[delta.choice] += delta.token_ids
        for event in message.events:
            assert event.WhichOneof("kind") != "failed", event
            stats = event.finished.stats if event.WhichOneof("kind") == "finished" else stats
    return found, stats


@asynccontextmanager
async def asking(decode, prefill):
    """ask(number, prompt, n) -> the rows of each step of the decode node, and the tokens of each choice."""
    plans = []
    launch = decode.engine.runner.launch
    decode.engine.runner.launch = lambda plan: plans.append(plan.rows) or launch(plan)
    async with open_channel(decode._address) as channel, asyncio.timeout(60):
        call = decode_pb2_grpc.DecodeStub(channel).Generate()
        await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))

        async def ask(number, prompt=PROMPT, n=1, tokens=12):
            sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, seed=1)
            start = decode_pb2.DecodeStart(
                request=number,
                token_ids=prompt,
                sampling=sampling,
                n=n,
                prefill=[prefill._address],
                local_prefill_tokens=0,
            )
            plans.clear()
            await call.write(decode_pb2.GenerateCommand(start=start))
            found, stats = await answer_of(call, n)
            assert stats.prefill_address == prefill._address
            assert not any(row.tokens for rows in plans for row in rows)
            return [rows for rows in plans if rows], found

        yield ask


def save_eagle3(path):
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    layer = {
        "self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, 2 * HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"midlayer.{name}.weight": noise(*shape) for name, shape in layer.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(HIDDEN)
    tensors |= {"fc.weight": noise(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = noise(VOCAB, HIDDEN)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    }
    return save(path, config, tensors)


def save_medusa(path):
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for head in range(3):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"lm_heads.{head}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return save(path, {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}, tensors)


def save(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return str(path)


async def test_the_first_step_carries_drafts(tmp_path, monkeypatch):
    drafts = {"suffix": "suffix", "oracle": "suffix", "model": "demo"}
    drafts |= {"eagle3": save_eagle3(tmp_path / "eagle3"), "medusa": save_medusa(tmp_path / "medusa")}
    async with running(PrefillNode(PrefillConfig(**MADE))) as prefill:
        async with running(DecodeNode(DecodeConfig(**MADE))) as decode, asking(decode, prefill) as ask:
            _, (without,) = await ask(1)
        known = tmp_path / "known"
        known.write_text(json.dumps({"prompt": prompt_digest(PROMPT), "tokens": without}))
        for name, draft in drafts.items():
            with monkeypatch.context() as patched:
                if name == "oracle":
                    patched.setenv(ORACLE, str(known))
                decode = DecodeNode(DecodeConfig(**MADE, draft=draft, draft_tokens=MOST))
                async with running(decode), asking(decode, prefill) as ask:
                    assert decode.load().drafter == name
                    steps, found = await ask(1)
                    assert found == [without], name
                    if name == "suffix":  # knows what was said before
                        steps, found = await ask(3)
                    assert steps[0][0].drafts, name
                    steps, found = await ask(2, n=3)
                    assert found == [without] * 3, name
                    assert steps[0] and all(row.drafts for row in steps[0]), name
